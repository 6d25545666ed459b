"""What an EAGLE head minimises: a draft from every token of an answer, step by step as in decoding.

Shapes: B rows, T tokens, A anchors a row, R anchors of all rows, F feature width, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from heads import Eagle3Head, EagleHead
from training.objective import DECAY, Objective
from training.teacher import Lesson
from training.unrolled import Unrolled


class EagleObjective(Objective):
    """The loss of an EAGLE head, over `steps` drafting steps from every anchor at once.

    More than one step is EAGLE-3's training-time test, and HASS's alignment for EAGLE-1, whose states are features and
    are held to the target's: `regression` weighs their smooth L1 distance, a mean over H (EAGLE, 4.1; 10 there, where
    the tokens' loss has 0.1). noise: half the width of what is added to the features, for texts of 512 tokens; more in
    shorter ones (EAGLE's code). The text's own tokens are followed, as if they had been drafted.
    """

    head: EagleHead | Eagle3Head

    def __init__(
        self,
        head: Any,
        loss: str,
        embedding: Tensor,
        steps: int,
        regression: float = 0.0,
        noise: float = 0.0,
        decay: float = DECAY,
    ) -> None:
        super().__init__(head, loss, embedding, decay)
        self.steps, self.regression, self.noise = steps, regression, noise

    def guess(self, lesson: Lesson) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        columns, chosen = gather_anchors(lesson.answers)
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        tokens, said = (nn.functional.pad(part, (0, self.steps + 1)) for part in (lesson.tokens, lesson.answers))
        width = lesson.tokens.shape[1]
        context = Unrolled(columns)
        everywhere = torch.arange(width, device=columns.device)[None]
        fused = self.head.fuse(self._disturb(self.features(lesson)))
        states = self.head(self.embed(tokens[:, 1 : width + 1]), fused, everywhere, context=context)[rows, columns]
        for step in range(self.steps):
            if step:
                followed = self.embed(tokens[rows, columns + 1 + step])
                states = self.head(followed, states, columns + step, context=context)
            chosen = chosen & said[rows, columns + 1 + step]
            row = rows.expand_as(columns)[chosen]
            yield states[chosen], row, columns[chosen] + 1 + step

    def regress(self, lesson: Lesson, states: Tensor, row: Tensor, column: Tensor) -> Tensor | float:
        if not self.regression:
            return 0.0
        wanted = lesson.features[row, column].to(states.dtype)
        distance = nn.functional.smooth_l1_loss(states, wanted, reduction="none").mean(dim=-1)
        return self.regression * distance.sum(dtype=torch.float32)

    def _disturb(self, features: Tensor) -> Tensor:
        if not (self.noise and self.training):
            return features
        width = self.noise * 512 / features.shape[1]
        return features + (2 * torch.rand_like(features) - 1) * width


def gather_anchors(answers: Tensor) -> tuple[Tensor, Tensor]:
    """The columns [B, A] where a mask [B, T] is true, each row's in order, at least one; and which of them are true."""
    most = max(1, int(answers.sum(dim=1).max()))
    columns = answers.logical_not().sort(dim=1, stable=True).indices[:, :most]
    return columns, answers.gather(1, columns)
