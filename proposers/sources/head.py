"""A trained head as a source: it continues a whole level of nodes at once, because each level is a pass of the head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode import Step
from proposers.feature_history import numbers_of
from proposers.head_proposer import HeadProposer
from proposers.sources.growing_tree import Node
from proposers.sources.source import Named
from proposers.trees.search import ScoredDrafter

PARTS = 10  # probabilities are counted alike in so many parts


class HeadSource:
    """Continues nodes by a head's calibrated probabilities, whichever source named the nodes.

    proposer: holds the head, its calibration, and how deep and wide it drafts. It drafts for this source only.
    """

    def __init__(self, proposer: HeadProposer) -> None:
        self.proposer, self.width, self.depth = proposer, proposer.width, proposer.depth
        self._drafter: ScoredDrafter

    @torch.no_grad()
    def start(self, step: Step) -> None:
        """Begin a draft: the first paths to continue are the roots."""
        proposer, self._level = self.proposer, 0
        drafter = proposer.start_drafter(proposer.read_step(step) | {"roots": numbers_of(step)["roots"]}, step.target)
        self._drafter = ScoredDrafter(drafter, proposer.head.token_map, proposer.calibration)
        self._device = step.target.device

    @torch.no_grad()
    def extend(self, paths: Sequence[Sequence[Node]]) -> list[list[list[Named]]]:
        """The most likely next tokens of each row's paths, by row and path. NaN counts as 0.

        paths: the nodes at their ends, first the roots. Then the last call continued their parents, each at the place
        `Node.path` of its row.
        """
        width = max(map(len, paths))
        rows = [[*row, *[None] * (width - len(row))] for row in paths]
        p = torch.tensor([[node.p if node else 1.0 for node in row] for row in rows], device=self._device)
        if self._level:
            parents = [[node.parent.path if node and node.parent else 0 for node in row] for row in rows]
            tokens = [[node.token if node else 0 for node in row] for row in rows]
            self._drafter.inner.extend(*(torch.tensor(part, device=self._device) for part in (parents, tokens)))
        level, scores = self._level, p.log()
        drafted, longer, *_ = self._drafter.next_paths(level, self.proposer.ranks, scores, torch.empty(0))
        found = (longer - scores[:, :, None]).exp().nan_to_num(nan=0.0)  # by row, path and rank
        self._level += 1
        return [
            [
                [(token, each, (level, rank, int(each * PARTS))) for rank, (token, each) in enumerate(pairs)]
                for pairs in (zip(*path, strict=True) for path in zip(*row, strict=True))
            ]
            for row in zip(drafted.tolist(), found.tolist(), strict=True)
        ]
