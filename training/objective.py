"""How far a head is from the target on a batch of texts.

Shapes: B rows, T tokens, R anchors, K heads, H hidden size, V vocabulary, D draft vocabulary, S labels.

An anchor is a committed token t whose feature a head drafts from. The token after it is chosen already; head i
guesses token t + 2 + i, of which the target spoke in row t + 1 + i.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads import HydraHead, MedusaHead
from training.losses import vocabulary_loss
from training.teacher import Lesson

DECAY = 0.8  # Medusa, 2.2.1


@dataclass(frozen=True)
class Loss:
    """`total`: what is minimised, a sum over anchors. By head: how many anchors it had, and on how many of them its
    best guess was right: the likeliest label or, with "ce", the text's token."""

    total: Tensor
    anchors: Tensor  # [K]
    agreed: Tensor  # [K]


class Objective(nn.Module, ABC):
    """What is minimised: the loss of a head's law against the target's, over all its guesses.

    embedding: the target's [V, H], for heads that read guesses. decay: the weight of each guess against that for the
    token before it.
    """

    embedding: Tensor | None
    drafted: Tensor

    def __init__(self, head: Any, loss: str, embedding: Tensor | None, decay: float = DECAY) -> None:
        super().__init__()
        self.head, self.loss, self.decay = head, loss, decay
        self.register_buffer("embedding", None if embedding is None else embedding.detach(), persistent=False)
        drafted = torch.full((head.vocab_size,), -1)
        own = torch.arange(head.vocab_size) if head.token_map is None else head.token_map.cpu()
        drafted[own] = torch.arange(head.draft_size)
        self.register_buffer("drafted", drafted, persistent=False)  # [V] target's id -> draft id, or -1

    def forward(self, lesson: Lesson) -> Loss:
        total = lesson.features.new_zeros((), dtype=torch.float32)
        anchors, agreed = [], []
        for index, (states, row, column) in enumerate(self.guess(lesson)):
            loss, right = self._judge(lesson, index, states, row, column)
            total = total + self.decay**index * (loss + self.regress(lesson, states, row, column))
            anchors.append(len(row))
            agreed.append(right.sum())
        return Loss(total, torch.tensor(anchors, device=total.device), torch.stack(agreed))

    @abstractmethod
    def guess(self, lesson: Lesson) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each depth the states [R, H] of its anchors, and the row and column of what the target said there."""

    def regress(self, lesson: Lesson, states: Tensor, row: Tensor, column: Tensor) -> Tensor | float:
        """What else the states [R, H] are to be, a sum over anchors."""
        return 0.0

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings [..., H] of tokens [...]."""
        assert self.embedding is not None
        return nn.functional.embedding(tokens, self.embedding)

    def _judge(self, lesson: Lesson, index: int, states: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of the guesses of a depth, summed, and [R] bool: which were right."""
        if self.loss == "ce":
            labels = lesson.tokens[row, column + 1][:, None]
            chances = torch.ones_like(labels, dtype=torch.float32)
        else:
            labels, chances = lesson.labels[row, column], lesson.chances[row, column]
        weight, bias = self.head.output_layer(index)
        normed = self.head.normalise(states)
        return vocabulary_loss(self.loss, normed, weight, bias, self.drafted[labels], chances)

    def features(self, lesson: Lesson) -> Tensor:
        """The target's features [B, T, F] in the head's number format."""
        return lesson.features.to(next(self.head.parameters()).dtype)


class HeadObjective(Objective):
    """The loss of a Medusa or Hydra head."""

    head: MedusaHead | HydraHead

    def guess(self, lesson: Lesson) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        row, column = lesson.answers.nonzero(as_tuple=True)
        features = self.features(lesson)
        if isinstance(self.head, HydraHead):
            features = self.head.contextualize(features)
        features = features[row, column]
        said = nn.functional.pad(lesson.answers, (0, self.head.depth + 1))
        for index in range(self.head.depth):
            going_on = said[row, column + 1 + index]
            row, column, features = row[going_on], column[going_on], features[going_on]
            if isinstance(self.head, MedusaHead):
                states = self.head.blocks[index](features)
            else:
                guessed = column[:, None] + torch.arange(1, index + 2, device=column.device)
                states = self.head(features, self.embed(lesson.tokens[row[:, None], guessed]), index)
            yield states, row, column + 1 + index
