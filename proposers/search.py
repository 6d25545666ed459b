"""Draft trees from a drafter: a best-first search level by level, and the tree of its best candidates.

Drafts are coupled: where the target samples, they know the noise that it will sample with. The target draws a token by
the Gumbel-max trick: the largest of log p + G, where the noise G is keyed by seed, request, position and token. A draft
that adds the same noise to its own log-probabilities finds the same token wherever its probabilities are close to the
target's (Daliri, Musco, Suresh, "Coupling without Communication", 2024, for chains). It is deterministic given the
noise. So it is verified as any other, and the text is that of plain decoding.

Shapes: B rows, W paths that are followed further, R ranks (next tokens of a path), M candidates, C chosen ones, L
levels, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from decode import Sampling, Step, Tree
from decode.devices.backend import top_tokens
from decode.devices.transfer import read, waits
from decode.trees.noise import TEXT, find_keys, make_exponential
from decode.trees.sampling import for_groups, upcast_half
from proposers.calibration import Calibration
from proposers.draft_budget import FOLLOWED, DraftBudget

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
    """A drafter, and how its tokens are chosen and scored.

    token_map [D]: the target's token of each draft id; None: the same. calibration: None takes its own probabilities.
    samplings: of each row. keys [B, >= L]: of the noise at each level (`find_noise`); None: the target samples no row.
    noise_tokens [D]: the tokens whose noise counts, where these are not those of `token_map`.
    """

    inner: Drafter
    token_map: Tensor | None = None
    calibration: Calibration | None = None
    samplings: Sequence[Sampling] = ()
    keys: Tensor | None = None
    noise_tokens: Tensor | None = None

    def name_next(self, level: int, ranks: int, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The next tokens of the paths and the scores of the longer paths, [B, W, R] each.

        scores [B, W]: the log-probabilities that the paths are right.
        """
        logits, path = self.inner.logits(level), scores[:, :, None]
        if self.keys is not None:
            known = self.token_map if self.noise_tokens is None else self.noise_tokens
            logits = add_noise(logits, self.samplings, self.keys[:, level], known)
        ids, log_p = top_tokens(logits, ranks)  # [B, W, R]
        if self.calibration is not None:
            log_p = self.calibration.log_probabilities(level, log_p, path)
        longer = (path + log_p).nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # NaN would rank before its parent
        return (ids if self.token_map is None else self.token_map[ids]).expand_as(longer), longer


def add_noise(logits: Tensor, samplings: Sequence[Sampling], keys: Tensor, tokens: Tensor | None) -> Tensor:
    """Logits [B, W, D] float32 whose order is that of the draft's choices, and whose softmax is their probability.

    They are the logits plus the noise times the temperature: as the temperature falls, the noise counts less.
    keys [B]: of the level's noise. tokens [D]: the target's tokens of the draft ids; None: the same.
    """
    logits = logits.expand(len(keys), -1, -1)
    tokens = torch.arange(logits.shape[2], device=logits.device) if tokens is None else tokens

    def perturb(sampling: Sampling, rows: Any) -> Tensor:
        scores = upcast_half(logits[rows])
        if sampling.greedy:
            return scores
        noise = make_exponential(keys[rows], tokens).log_().neg_().float()  # [B, D] Gumbel noise
        warped = scores.flatten(0, 1)
        for warper in sampling.warpers:
            warped = warper(None, warped)
        return sampling.temperature * (warped.view(scores.shape) + noise[:, None])

    return for_groups(samplings, perturb)


def find_noise(step: Step, levels: int, stream: int = TEXT) -> Tensor:
    """The keys [B, >= levels] of the tokens after each row's root, or of another stream's decisions there."""
    texts = dict(zip(step.request_ids, step.sequences, strict=True))
    return find_keys(stream, levels, step.samplings[0].seed, texts, step.target.device, step.upload)


class DraftToken(NamedTuple):
    """A draft token, the index of its parent among the tokens (-1: the root), and its path's log-probability."""

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
        right: Tensor | None = None,
        has_figures: bool = False,
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
        best = torch.sort(upcast_half(scores), dim=1, descending=True, stable=True)
        scores, chosen = best.values[:, : nodes - 1], best.indices[:, : nodes - 1]  # [B, C]
        places = torch.arange(1, chosen.shape[1] + 1, device=tokens.device)
        node = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.long, device=tokens.device)  # last: the root's
        node.scatter_(1, chosen, places.expand_as(chosen))
        above = node.gather(1, parents.gather(1, chosen) % node.shape[1])
        largest = Tree(
            torch.cat([roots[:, None], tokens.gather(1, chosen)], dim=1),
            torch.cat([torch.full_like(roots[:, None], -1), above], dim=1),
            torch.full_like(roots, chosen.shape[1] + 1),
            min(chosen.shape[1], levels),
            scores=nn.functional.pad(scores, (1, 0)),
        )
        figures = scores[:0]
        if has_figures:
            each = scores.flatten().sort(descending=True).values.exp() if shares else scores.exp().sum(dim=0)
            figures = torch.cat([scores.new_zeros(1), each.cumsum(dim=0)]) / len(scores)
            figures = figures if right is None else torch.cat([figures, right])
        return cls(largest, figures, levels, shares)

    @classmethod
    def of_rows(
        cls, roots: Sequence[int], rows: Sequence[Sequence[DraftToken]], nodes: int, like: Draft | None = None
    ) -> Draft:
        """`of` for each row's candidates, without impossible ones. like: a draft with the same levels and figures."""
        width = max(map(len, rows))
        padded = [[*row, *[DraftToken(0, -1, -inf)] * (width - len(row))] for row in rows]
        numbers = torch.tensor(padded, dtype=torch.double).view(len(rows), width, 3)
        sizes = [min(nodes, 1 + sum(each.score > -inf for each in row)) for row in rows]
        tokens, parents = numbers[..., 0].long(), numbers[..., 1].long()
        has_figures, shares = like is not None and len(like.figures) > 0, like is not None and like.shares
        right = read(like.figures)[like.largest.width :] if like is not None and has_figures and not shares else None
        found = cls.of(torch.tensor(roots), tokens, parents, numbers[..., 2], 0, max(sizes), right, has_figures, shares)
        largest = found.largest.limit(sizes)
        largest = replace(largest, height=largest.width - 1)
        return replace(found, largest=largest, levels=0 if like is None else like.levels)

    def grown(self, times: int) -> Tree:
        """The best trees after growing from their roots: by a node each, or by one in all where they share a budget."""
        if not self.shares:
            return self.largest.first(1 + times)
        assert self.largest.scores is not None
        scores = self.largest.scores[:, 1:]
        best = scores.flatten().sort(descending=True, stable=True).indices[:times] // scores.shape[1]
        return self.largest.limit((1 + best.bincount(minlength=len(scores))).tolist())

    def read_figures(self) -> tuple[list[float], list[float]]:
        """The tokens that trees should have accepted after growing 0, 1, ... times, on average over the rows; `right`.

        Synchronizes a GPU.
        """
        numbers, sizes = read(self.figures).tolist(), self.largest.width
        return (numbers, []) if self.shares else (numbers[:sizes], numbers[sizes:])


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
        tokens, longer = drafter.name_next(len(found), ranks, scores)
        sorted_paths = torch.sort(longer.flatten(1), dim=1, descending=True, stable=True)  # the order of `Draft.of`
        scores, index = sorted_paths.values[:, :width], sorted_paths.indices[:, :width]
        chosen = [index // longer.shape[2], tokens.flatten(1).gather(1, index), index + first_place]
        found.append((tokens.flatten(1), longer.flatten(1), places))
        is_last = len(found) == levels
        if is_last and budget is None:
            break
        best.append(scores)
        if is_last:
            break
        if budget is not None and can_read:
            right = (FOLLOWED * scores.exp().mean(dim=0)).tolist()
            if not budget.is_worth_a_level(right):
                break
        if can_read:
            scored = [part for _, part, _ in found]
            useful = count_useful(scores, scored, nodes, budget.least_worth if budget else 0.0)
            if not useful:
                break
            scores, *chosen = (part[:, :useful] for part in (scores, *chosen))
        parents, tokens, places = chosen
        drafter.inner.extend(parents, tokens)
    figures = None if can_read or budget is None else expect_right(best)
    tokens, scores, places = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))  # of all levels
    parents = places.repeat_interleave(longer.shape[2], dim=1)
    return Draft.of(roots, tokens, parents, scores, len(found), nodes, figures, has_figures, shares)


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
