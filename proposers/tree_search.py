"""Candidates for a draft tree: found level by level by what a head is sure of, or laid out as a fixed tree says.

Shapes: B rows, W paths that are followed further, R ranks (a path's likeliest next tokens), M candidates, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from decode import Tree
from proposers.fixed_trees import Shape

# From a level, log-probabilities [B, W, R] of the likeliest tokens and the scores [B, W, 1] of the paths before them
# to the log of the chance that each is right where its path is: at most 0.
Confidence: TypeAlias = Callable[[int, Tensor, Tensor], Tensor]
# From logits [B, W, D] ([B, 1, D] where all paths have the same), a number of ranks and where the W paths end among the
# candidates, [B, W], -1 at the root, to the draft ids [B, W, R] that are tried behind each and their log-probabilities.
Pick: TypeAlias = Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor]]
RANKS = 10  # likeliest next tokens of a path that may become nodes


class Guesses(Protocol):
    """What a head says of the next tokens of one step, level by level."""

    def logits(self, level: int) -> Tensor:
        """Of the token behind each path last followed, [B, W, D]; [B, 1, D] at first, behind the root, and where all
        paths have the same."""
        ...

    def tokens(self, drafted: Tensor) -> Tensor:
        """The target's ids of draft ids."""
        ...

    def follow(self, origin: Tensor, tokens: Tensor) -> None:
        """Go on with W paths: each is the one at `origin` [B, W] among those before, and its next token [B, W]."""
        ...


@dataclass(frozen=True)
class Candidates:
    """More nodes than a tree is made of: node j guesses `tokens[j]` after candidate `parents[j]`, or the root (-1).

    `scores` are logs of the chance that the whole path is right. `ordered`: the first n candidates are the best n (a
    fixed tree); otherwise the likeliest are.
    """

    roots: Tensor  # [B] long
    tokens: Tensor  # [B, M] long
    parents: Tensor  # [B, M] long
    scores: Tensor  # [B, M] float32
    levels: int
    ordered: bool = False

    def gains(self, nodes: int) -> Tensor:
        """The tokens that a tree of 1, 2, ... nodes (root included) should have accepted, all rows together."""
        best = self.scores if self.ordered else self.scores.topk(min(nodes - 1, self.scores.shape[1]), dim=1).values
        return torch.cat([best.new_zeros(1), best[:, : nodes - 1].exp().sum(dim=0).cumsum(dim=0)])

    def tree(self, nodes: int) -> Tree:
        """The best `nodes` nodes, root included."""
        if not self.ordered:
            tree = Tree.best_first(self.roots, self.tokens, self.parents, self.scores, nodes)
            return replace(tree, height=min(tree.height, self.levels))
        tokens, parents, scores = (part[:, : nodes - 1] for part in (self.tokens, self.parents, self.scores))
        first = torch.zeros_like(self.roots[:, None])
        return Tree(
            tokens=torch.cat([self.roots[:, None], tokens], dim=1),
            parents=torch.cat([first - 1, parents + 1], dim=1),
            sizes=torch.full_like(self.roots, 1 + tokens.shape[1]),
            height=min(self.levels, tokens.shape[1]),
            scores=torch.cat([first, scores], dim=1),
        )


def pick_likeliest(logits: Tensor, ranks: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """The `Pick` of drafts without chance: what is likeliest hangs on no place."""
    return rank_tokens(logits, ranks)


def search(
    roots: Tensor,
    guesses: Guesses,
    levels: int,
    width: int,
    confidence: Confidence,
    pays: Callable[[Tensor], bool],
    ranks: int = RANKS,
    pick: Pick = pick_likeliest,
) -> Candidates:
    """Best-first search in waves: at each level the `width` likeliest paths get `ranks` next tokens by `pick`.

    All of these become candidates, not only those that are followed (EAGLE-2, section 4.2). It ends after `levels`, or
    where, given the scores [B, W] of the paths to be followed, one more level no longer `pays`. roots [B].
    """
    scores = torch.zeros_like(roots[:, None], dtype=torch.float32)  # [B, W]
    places = torch.full_like(roots[:, None], -1)  # [B, W]: where the paths followed end among the candidates
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    while True:
        drafted, sure = pick(guesses.logits(len(found)), ranks, places)  # [B, W, R], or [B, 1, R] for all paths
        before = scores[:, :, None]
        reached = before + confidence(len(found), sure, before)  # [B, W, R]
        tokens = guesses.tokens(drafted).expand_as(reached).flatten(1)
        parents = places[:, :, None].expand_as(reached).flatten(1)
        order = torch.sort(reached.flatten(1), dim=1, descending=True, stable=True)  # the order of `Tree.best_first`
        scores, index = order.values[:, :width], order.indices[:, :width]
        places = index + sum(part.shape[1] for part, _, _ in found)
        found.append((tokens, parents, reached.flatten(1)))
        if len(found) == levels or not pays(scores):
            break
        guesses.follow(index // reached.shape[2], tokens.gather(1, index))
    tokens, parents, scores = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return Candidates(roots, tokens, parents, scores, len(found))


def fill_shape(
    roots: Tensor, guesses: Guesses, shape: Shape, confidence: Confidence, pick: Pick = pick_likeliest
) -> Candidates:
    """The tokens of a fixed tree: those with the ranks that it names, whatever their chances. roots [B]."""
    scores = torch.zeros_like(roots[:, None], dtype=torch.float32)  # [B, W] of the paths followed
    places = torch.full_like(roots[:, None], -1)  # [B, W]: where they end among the candidates
    found: list[tuple[Tensor, Tensor]] = []
    for index, level in enumerate(shape.levels):
        drafted, sure = pick(guesses.logits(index), level.most, places)
        before = scores[:, :, None]
        reached = before + confidence(index, sure, before)  # [B, W, R]
        drafted = guesses.tokens(drafted).expand_as(reached)
        found.append((drafted[:, level.above, level.ranks], reached[:, level.above, level.ranks]))
        tokens, scores = (part[:, level.followed] for part in found[-1])
        places = level.places.expand_as(tokens)
        if index + 1 < len(shape.levels):
            guesses.follow(level.origin.expand_as(tokens), tokens)
    tokens, scores = (torch.cat(parts, dim=1)[:, shape.order] for parts in zip(*found, strict=True))
    return Candidates(roots, tokens, shape.parents.expand_as(tokens), scores, len(shape.levels), ordered=True)


def rank_tokens(logits: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """The likeliest draft ids [B, W, R] and their log-probabilities in float32, likeliest first."""
    logits = logits.float()
    best = logits.topk(min(ranks, logits.shape[-1]), dim=-1)
    return best.indices, (best.values - logits.logsumexp(dim=-1, keepdim=True)).clamp(max=0)
