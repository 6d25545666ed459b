"""Sources that continue a whole level of nodes at once, because each level takes them a forward pass."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from decode import Step, Target
from heads.vocabulary import top_tokens
from proposers.draft import LONGEST, DraftProposer
from proposers.draft_session import DraftSession
from proposers.feature_history import numbers_of
from proposers.head_proposer import HeadProposer
from proposers.sources.source import Continuation
from proposers.trees.search import RANKS, ScoredDrafter

PARTS = 10  # probabilities are counted alike in so many parts


class LevelSource(Protocol):
    """Continues at most `width` nodes of each level, which extend nodes of the level before.

    It may have a method `fuse`, as in `decode.Proposer`.
    """

    name: str  # what accepted tokens are counted under
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
        self.proposer, self.name = proposer, proposer.head.kind
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
        drafter = proposer.start_drafter(proposer.read_step(step) | {"roots": roots}, step.target)
        self._drafter = ScoredDrafter(drafter, proposer.head.token_map, proposer.calibration)
        return [row[0] for row in self._name(torch.zeros_like(roots[:, None], dtype=torch.float32))]

    @torch.no_grad()
    def extend(self, parents: Tensor, tokens: Tensor, scores: Tensor) -> list[list[list[Continuation]]]:
        self._level += 1
        self._drafter.inner.extend(parents, tokens)
        return self._name(scores)

    def _name(self, scores: Tensor) -> list[list[list[Continuation]]]:
        tokens, longer = self._drafter.next_tokens(self._level, self.proposer.ranks, scores, torch.empty(0))
        return name_likely(self._level, tokens, (longer - scores[:, :, None]).exp())


class DraftSource:
    """A smaller model: continues nodes by its own probabilities, whichever source named the nodes.

    proposer: has the draft model, the number of paths, and the number of levels. Logits processors do not apply to it.

    Raises ValueError for a proposer of sampled drafts, and, in its first step, for another vocabulary.
    """

    layers: tuple[int, ...] = ()
    name = "draft"

    def __init__(self, proposer: DraftProposer) -> None:
        if proposer.sampled:
            raise ValueError("a source names the most likely tokens; give a draft proposer with sampled=False")
        self.proposer, self.width, self.depth = proposer, proposer.width, proposer.length or LONGEST
        self._session = DraftSession(proposer.draft)
        self._level = 0

    def observe(self, step: Step) -> None:
        if step.is_prefill:
            self.proposer.check(step.target)
        self._session.observe(step)

    def renew(self) -> DraftSource:
        return DraftSource(self.proposer)

    def start(self, step: Step) -> list[list[Continuation]]:
        self._level = 0
        return [row[0] for row in self._name(self._session.start(step)[:, None])]

    def extend(self, parents: Tensor, tokens: Tensor, scores: Tensor) -> list[list[list[Continuation]]]:
        self._level += 1
        return self._name(self._session.extend(parents, tokens))

    def _name(self, logits: Tensor) -> list[list[list[Continuation]]]:
        tokens, log_p = top_tokens(logits, RANKS)
        return name_likely(self._level, tokens, log_p.exp())


def name_likely(level: int, tokens: Tensor, p: Tensor) -> list[list[list[Continuation]]]:
    """The continuations of each row's paths, from their tokens and probabilities [B, W, R], the most likely first.

    NaN counts as 0.
    """
    return [
        [
            [
                Continuation(token, each, (level, rank, int(each * PARTS)))
                for rank, (token, each) in enumerate(zip(*path, strict=True))
            ]
            for path in zip(*row, strict=True)
        ]
        for row in zip(tokens.tolist(), p.nan_to_num(nan=0.0).tolist(), strict=True)
    ]
