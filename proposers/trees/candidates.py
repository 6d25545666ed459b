"""A head's candidates for nodes, and the trees of the best of them.

Shapes: B rows, M candidates, C chosen ones, V the target's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from decode import Tree
from decode.gpu.fusion import fused
from decode.gpu.transfer import read


@dataclass(frozen=True)
class Candidates:
    """The nodes to choose a tree from: node j drafts `tokens[j]` after candidate `parents[j]`, or the root (-1).

    scores: the log-probabilities that whole paths are right.
    right: the probability, on average over the rows, that a path down to level 1, 2, ... is right; for some searches.
    """

    roots: Tensor  # [B] long
    tokens: Tensor  # [B, M] long
    parents: Tensor  # [B, M] long
    scores: Tensor  # [B, M] float32
    levels: int
    right: Tensor | None = None  # [levels]

    @cached_property
    def ranked(self) -> tuple[Tensor, Tensor]:
        """Scores [B, M] from the best to the worst, and whose they are. The root and the first n are a tree.

        A score is a path's log-probability, so no child scores above its parent, and ties go to the earlier candidate.
        float32 keeps half precision from making more ties.
        """
        best = torch.sort(self.scores.float(), dim=1, descending=True, stable=True)
        return best.values, best.indices

    def tree(self, nodes: int) -> Tree:
        """The tree of the best `nodes` nodes, root included, the best ones first."""
        scores, chosen = (part[:, : nodes - 1] for part in self.ranked)
        drafted, above, scores = _join_nodes(self.roots, self.tokens, self.parents, chosen, scores)
        sizes, height = torch.full_like(self.roots, chosen.shape[1] + 1), min(chosen.shape[1], self.levels)
        return Tree(drafted, above, sizes, height, scores=scores)

    def figures(self, nodes: int) -> Tensor:
        """The figures of `read_figures`, on the device."""
        return _expect(self.ranked[0][:, : nodes - 1], self.right)

    def read_figures(self, nodes: int) -> tuple[list[float], list[float]]:
        """The tokens that trees of 1, 2, ... `nodes` nodes should have accepted, on average over the rows; and `right`.

        Synchronizes a GPU.
        """
        return _read(self.figures(nodes), min(nodes, self.tokens.shape[1] + 1))


@dataclass(frozen=True)
class BestTree:
    """What a draft as a CUDA graph returns: the largest tree, whose first n nodes are the tree of n, and `figures`."""

    largest: Tree
    figures: Tensor
    levels: int

    @classmethod
    def of(cls, candidates: Candidates, nodes: int) -> BestTree:
        """For trees of up to `nodes` nodes."""
        return cls(candidates.tree(nodes), candidates.figures(nodes), candidates.levels)

    def tree(self, nodes: int) -> Tree:
        """As `Candidates.tree`."""
        return self.largest.first(nodes)

    def read_figures(self, nodes: int) -> tuple[list[float], list[float]]:
        """As `Candidates.read_figures`."""
        return _read(self.figures, min(nodes, self.largest.width))


@fused
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


@fused
def _expect(scores: Tensor, right: Tensor | None) -> Tensor:
    """`Candidates.figures`, from the scores [B, C] of the best candidates."""
    accepted = scores.exp().sum(dim=0).cumsum(dim=0)
    expected = torch.cat([scores.new_zeros(1), accepted]) / len(scores)
    return expected if right is None else torch.cat([expected, right])


def _read(figures: Tensor, sizes: int) -> tuple[list[float], list[float]]:
    """The figures of the first `sizes` sizes, and those after them."""
    numbers = read(figures).tolist()
    return numbers[:sizes], numbers[sizes:]
