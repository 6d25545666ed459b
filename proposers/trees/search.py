"""Draft trees from a drafter: a best-first search level by level.

Shapes: B rows, W paths that are followed further, R ranks (next tokens of a path), M candidates, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from decode.devices.transfer import waits
from heads.vocabulary import top_tokens
from proposers.calibration import Calibration
from proposers.draft_budget import DraftBudget
from proposers.trees.coupled import Coupling
from proposers.trees.draft import Draft

RANKS = 10  # most likely next tokens of a path that become candidates


class Drafter(Protocol):
    """A head that drafts one step, level by level."""

    def logits(self, level: int) -> Tensor:
        """The logits of the token after each path, [B, W, D], or [B, 1, D] if all paths have the same.

        The only path at level 0 is the root.
        """
        ...

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        """Replace the paths by W others: each is the path `parents` [B, W] and its next token [B, W]."""
        ...


@dataclass(frozen=True)
class ScoredDrafter:
    """A drafter, and how its tokens are chosen and scored."""

    inner: Drafter
    token_map: Tensor | None = None  # [D]: the target's token for each draft id; None: the same
    calibration: Calibration | None = None  # None: the head's own probabilities
    coupling: Coupling | None = None  # where the target samples

    def next_paths(
        self, level: int, ranks: int, scores: Tensor, first_place: int = 0, width: int = 1
    ) -> tuple[Tensor, ...]:
        """The next tokens of the paths and the scores of the longer paths, [B, W, R] each; and the best of these.

        scores [B, W]: the log-probabilities that the paths are right. first_place: that of the level's first candidate.
        The best `width` ones of the level are returned as four tensors [B, width]: scores, the indices of their paths,
        tokens, and places.
        """
        logits, path = self.inner.logits(level), scores[:, :, None]
        if self.coupling is not None:
            logits = self.coupling.perturb(logits, level, self.token_map)
        ids, log_p = top_tokens(logits, ranks)  # [B, W, R]
        if self.calibration is not None:
            log_p = self.calibration.log_probabilities(level, log_p, path)
        longer = (path + log_p).nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # NaN would rank before its parent
        tokens = (ids if self.token_map is None else self.token_map[ids]).expand_as(longer)
        best = torch.sort(longer.flatten(1), dim=1, descending=True, stable=True)  # the order of `Draft.of`
        index = best.indices[:, :width]
        chosen = index // longer.shape[2], tokens.flatten(1).gather(1, index), index + first_place
        return tokens, longer, best.values[:, :width], *chosen


def search(
    roots: Tensor,
    drafter: ScoredDrafter,
    levels: int,
    width: int,
    ranks: int,
    nodes: int,
    budget: DraftBudget | None = None,
    has_figures: bool = False,
    shares: bool = False,
) -> Draft:
    """Best-first search: at each level the `width` best paths get `ranks` next tokens each.

    All next tokens become candidates, not only those that are followed further (EAGLE-2, section 4.2).
    roots [B]. levels: at most; a CPU stops earlier where the budget finds one more level not worth it. nodes: the size
    of the largest tree that is wanted. A CPU does not follow paths that are too unlikely for it, or for their time.
    A GPU would have to wait for such decisions. There all levels are drafted with `width` paths, and the budget chooses
    the levels of the next step from `Draft.figures`. has_figures: whether the draft has them. shares: whether the rows
    share a budget of nodes.
    """
    scores = torch.zeros_like(roots[:, None], dtype=torch.float32)  # of the only path before the first level
    places = torch.full_like(roots[:, None], -1)  # the root
    found: list[tuple[Tensor, Tensor, Tensor]] = []  # of each level: tokens and scores [B, W R], and `places`
    best: list[Tensor] = []  # of each level: the scores of the paths that could be followed further
    can_read = not waits(roots)
    while True:
        first_place = sum(part.shape[1] for part, _, _ in found)
        tokens, longer, scores, *chosen = drafter.next_paths(len(found), ranks, scores, first_place, width)
        found.append((tokens.flatten(1), longer.flatten(1), places))
        is_last = len(found) == levels
        if is_last and budget is None:
            break
        best.append(scores)
        if is_last or (budget is not None and can_read and not budget.is_worth_a_level(float(expect_right(best[-1:])))):
            break
        if can_read:
            scored = [part for _, part, _ in found]
            useful = count_useful(scores, scored, nodes, budget.least_worth if budget else 0.0)
            if not useful:
                break
            scores, *chosen = (part[:, :useful] for part in (scores, *chosen))
        parents, tokens, places = chosen
        drafter.inner.extend(parents, tokens)
    right = None if can_read or budget is None else expect_right(best)
    tokens, scores, places = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))  # of all levels
    parents = places.repeat_interleave(longer.shape[2], dim=1)
    return Draft.of(roots, tokens, parents, scores, len(found), nodes, right, has_figures, shares)


def expect_right(best: Sequence[Tensor]) -> Tensor:
    """By level: the probability that one of its paths is right, on average over the rows.

    best: the scores [B, W] of each level's paths.
    """
    width = max(scores.shape[1] for scores in best)
    padded = [nn.functional.pad(scores, (0, width - scores.shape[1]), value=-torch.inf) for scores in best]
    return torch.stack(padded).exp().sum(dim=(1, 2)) / len(best[0])


def count_useful(scores: Tensor, found: Sequence[Tensor], nodes: int, least: float) -> int:
    """How many of the paths [B, W], best first, may have a next token in a tree of the best `nodes` nodes in some row.

    A path's next tokens are less likely than the path. So the root, the path, all candidates `found` that are better
    and the next token must fit into the tree. least: the probability below which no node is wanted.
    """
    useful = scores.exp() >= least
    candidates = torch.cat([*found], dim=1)
    if candidates.shape[1] > nodes - 2:
        useful &= scores >= candidates.topk(nodes - 2, dim=1).values[:, -1:]
    return int(useful.sum(dim=1).max())
