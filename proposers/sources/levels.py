"""A source that continues a whole level of nodes at once, because each level takes it a forward pass."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from decode import Step, Target
from proposers.head_proposer import HeadProposer, numbers_of
from proposers.sources.source import Continuation
from proposers.tree_search import ScoredDrafter

PARTS = 10  # probabilities are counted alike in so many parts


class LevelSource(Protocol):
    """Continues at most `width` nodes of each level, which extend nodes of the level before.

    It may have a method `fuse`, as in `decode.Proposer`.
    """

    layers: tuple[int, ...]  # as in `decode.Proposer`
    width: int
    depth: int  # levels at most

    def observe(self, step: Step) -> None:
        """Take in a finished step. Called once before each draft."""
        ...

    def renew(self) -> LevelSource:
        """The same source with nothing learned."""
        ...

    def start(self, step: Step) -> list[list[Continuation]]:
        """The continuations of each row's root."""
        ...

    def extend(self, parents: Tensor, tokens: Tensor, scores: Tensor) -> list[list[list[Continuation]]]:
        """The continuations of each row's next paths, [B, W] each: the path `parents` of the last call and a token.

        scores: the log-probabilities that the paths are right.
        """
        ...


class HeadSource:
    """A trained head: continues nodes by its own calibrated probabilities, whichever source named the nodes.

    proposer: holds the head, its calibration, and how deep and wide it drafts. It drafts for this source only.
    """

    def __init__(self, proposer: HeadProposer) -> None:
        self.proposer = proposer
        self.layers, self.width, self.depth = tuple(proposer.layers), proposer.width, proposer.depth
        self._drafter: ScoredDrafter
        self._level = 0

    def observe(self, step: Step) -> None:
        self.proposer.observe(step)

    def fuse(self, target: Target, features: Tensor) -> Tensor:
        """As in `decode.Proposer`."""
        return self.proposer.fuse(target, features)

    def renew(self) -> HeadSource:
        return HeadSource(self.proposer.renew())

    @torch.no_grad()
    def start(self, step: Step) -> list[list[Continuation]]:
        roots = numbers_of(step)["roots"]
        proposer, self._level = self.proposer, 0
        drafter = proposer.start_drafter(step, roots)
        self._drafter = ScoredDrafter(drafter, proposer.head.token_map, proposer.calibration)
        return [row[0] for row in self._name(torch.zeros_like(roots[:, None], dtype=torch.float32))]

    @torch.no_grad()
    def extend(self, parents: Tensor, tokens: Tensor, scores: Tensor) -> list[list[list[Continuation]]]:
        self._level += 1
        self._drafter.inner.extend(parents, tokens)
        return self._name(scores)

    def _name(self, scores: Tensor) -> list[list[list[Continuation]]]:
        tokens, longer = self._drafter.next_tokens(self._level, self.proposer.ranks, scores, torch.empty(0))
        p = (longer - scores[:, :, None]).exp().tolist()
        return [
            [self._describe(*path) for path in zip(*row, strict=True)] for row in zip(tokens.tolist(), p, strict=True)
        ]

    def _describe(self, tokens: list[int], p: list[float]) -> list[Continuation]:
        level = self._level
        return [
            Continuation(token, each, (level, rank, int(each * PARTS)))
            for rank, (token, each) in enumerate(zip(tokens, p, strict=True))
        ]
