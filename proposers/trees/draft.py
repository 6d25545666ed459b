"""A head's draft: the tree of its best candidates, and what may be expected of it.

Shapes: B rows, M candidates, C chosen ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from decode import Tree
from decode.devices.transfer import read


class Node(NamedTuple):
    """A draft token, the number of its parent in the tree, and the log-probability that its path is right."""

    token: int
    parent: int
    score: float


@dataclass(frozen=True)
class Draft:
    """The largest tree that is wanted; its first n nodes are the best tree of n nodes."""

    largest: Tree
    figures: Tensor  # what `read_figures` reads; empty if no budget will choose among the trees
    levels: int
    shares: bool = False  # the rows share a budget of nodes

    @classmethod
    def of(
        cls,
        roots: Tensor,
        tokens: Tensor,
        parents: Tensor,
        scores: Tensor,
        levels: int,
        nodes: int,
        right: Tensor | None,
        has_figures: bool,
        shares: bool = False,
    ) -> Draft:
        """The best `nodes` nodes, root included.

        roots [B]; candidate j drafts `tokens[j]` after candidate `parents[j]`, or the root (-1) [B, M]. scores [B, M]:
        the log-probabilities that whole paths are right. So no child scores above its parent, and ties go to the
        earlier candidate: the root and the best n candidates are a tree. right [levels]: the probability, on average
        over the rows, that a path down to level 1, 2, ... is right; for some searches. shares: the rows share a budget
        of nodes.
        """
        # float32 keeps half precision from making more ties.
        best = torch.sort(scores.float(), dim=1, descending=True, stable=True)
        scores, chosen = best.values[:, : nodes - 1], best.indices[:, : nodes - 1]
        sizes, height = torch.full_like(roots, chosen.shape[1] + 1), min(chosen.shape[1], levels)
        drafted, above, padded = _join_nodes(roots, tokens, parents, chosen, scores)
        figures = _expect(scores, right, shares) if has_figures else scores[:0]
        return cls(Tree(drafted, above, sizes, height, scores=padded), figures, levels, shares)

    @classmethod
    def of_rows(cls, roots: Sequence[int], rows: Sequence[Sequence[Node]], like: Draft, has_figures: bool) -> Draft:
        """The trees of each row's nodes, best first and without the root; their levels are those of another draft."""
        tree = Tree.of_rows(
            [
                ([root, *(node.token for node in row)], [-1, *(node.parent for node in row)])
                for root, row in zip(roots, rows, strict=True)
            ]
        )
        scores = pad_sequence([torch.tensor([0.0, *(node.score for node in row)]) for row in rows], True, -torch.inf)
        right = read(like.figures)[like.largest.width :] if has_figures and not like.shares else None
        figures = _expect(scores[:, 1:], right, like.shares) if has_figures else scores[:0]
        return cls(replace(tree, scores=scores), figures, like.levels, like.shares)

    def tree(self, nodes: int) -> Tree:
        """The best tree of at most `nodes` nodes, the best ones first."""
        return self.largest.first(nodes)

    def grown(self, times: int) -> Tree:
        """The best trees after growing from their roots: by a node each, or by one in all where they share a budget."""
        if not self.shares:
            return self.tree(1 + times)
        assert self.largest.scores is not None
        scores = self.largest.scores[:, 1:]
        best = scores.flatten().sort(descending=True, stable=True).indices[:times] // scores.shape[1]
        sizes = (1 + best.bincount(minlength=len(scores))).tolist()
        return self.largest.limit(sizes)

    def read_figures(self) -> tuple[list[float], list[float]]:
        """The tokens that trees should have accepted after growing 0, 1, ... times, on average over the rows; `right`.

        Synchronizes a GPU.
        """
        numbers, sizes = read(self.figures).tolist(), self.largest.width
        return (numbers, []) if self.shares else (numbers[:sizes], numbers[sizes:])


def _join_nodes(
    roots: Tensor, tokens: Tensor, parents: Tensor, chosen: Tensor, scores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and scores [B, C + 1] of the tree of the candidates `chosen` [B, C], whose scores are given."""
    places = torch.arange(1, chosen.shape[1] + 1, device=tokens.device)
    node = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.long, device=tokens.device)  # last: the root's
    node.scatter_(1, chosen, places.expand_as(chosen))
    above = node.gather(1, parents.gather(1, chosen) % node.shape[1])
    return (
        torch.cat([roots[:, None], tokens.gather(1, chosen)], dim=1),
        torch.cat([torch.full_like(roots[:, None], -1), above], dim=1),
        nn.functional.pad(scores, (1, 0)),
    )


def _expect(scores: Tensor, right: Tensor | None, shares: bool) -> Tensor:
    """`Draft.figures`, from the scores [B, C] of the best candidates."""
    each = scores.flatten().sort(descending=True).values.exp() if shares else scores.exp().sum(dim=0)
    accepted = each.cumsum(dim=0)
    expected = torch.cat([scores.new_zeros(1), accepted]) / len(scores)
    return expected if right is None else torch.cat([expected, right])
