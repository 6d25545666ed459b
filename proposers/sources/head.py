"""A trained head as a source: it continues a whole level of nodes at once, because each level is a pass of the head."""

from __future__ import annotations

import torch
from torch import Tensor

from decode import Step
from proposers.feature_history import numbers_of
from proposers.head_proposer import HeadProposer
from proposers.sources.source import Named
from proposers.trees.search import ScoredDrafter

PARTS = 10  # probabilities are counted alike in so many parts


class HeadSource:
    """Continues nodes by a head's calibrated probabilities, whichever source named the nodes.

    proposer: holds the head, its calibration, and how deep and wide it drafts. It drafts for this source only.
    Shapes: B rows, W paths, R next tokens of a path.
    """

    def __init__(self, proposer: HeadProposer) -> None:
        self.proposer, self.width, self.depth = proposer, proposer.width, proposer.depth
        self._drafter: ScoredDrafter
        self._level = 0

    @torch.no_grad()
    def start(self, step: Step) -> list[list[Named]]:
        """The continuations of each row's root."""
        roots = numbers_of(step)["roots"]
        proposer, self._level = self.proposer, 0
        drafter = proposer.start_drafter(proposer.read_step(step) | {"roots": roots}, step.target)
        self._drafter = ScoredDrafter(drafter, proposer.head.token_map, proposer.calibration)
        return [row[0] for row in self._name(torch.zeros_like(roots[:, None], dtype=torch.float32))]

    @torch.no_grad()
    def extend(self, parents: Tensor, tokens: Tensor, scores: Tensor) -> list[list[list[Named]]]:
        """The continuations of each row's next paths: the path `parents` [B, W] of the last call and a token [B, W].

        scores [B, W]: the log-probabilities that the paths are right.
        """
        self._level += 1
        self._drafter.inner.extend(parents, tokens)
        return self._name(scores)

    def _name(self, scores: Tensor) -> list[list[list[Named]]]:
        """By row and path: the most likely next tokens. NaN counts as 0."""
        tokens, longer, *_ = self._drafter.next_paths(self._level, self.proposer.ranks, scores, torch.empty(0))
        p = (longer - scores[:, :, None]).exp().nan_to_num(nan=0.0)  # [B, W, R]
        return [
            [
                [(token, each, (self._level, rank, int(each * PARTS))) for rank, (token, each) in enumerate(pairs)]
                for pairs in (zip(*path, strict=True) for path in zip(*row, strict=True))
            ]
            for row in zip(tokens.tolist(), p.tolist(), strict=True)
        ]
