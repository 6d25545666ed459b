"""What a head minimises on a batch: the loss of its draft tokens' distribution against the target's.

Shapes: B rows, T tokens, R anchors, K depths, H hidden size, V vocabulary, D draft vocabulary, S labels.

An anchor is a committed token t whose feature a head drafts from. Token t + 1 is known already. Depth i predicts token
t + 2 + i; its training targets are at position t + 1 + i.
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
from training.teacher import Batch

DECAY = 0.8  # Medusa, section 2.2.1


@dataclass(frozen=True)
class Loss:
    """`total`, a sum over anchors, is minimised. By depth: the number of anchors, and for how many of them the head's
    most likely token is the target's or, with "ce", the text's."""

    total: Tensor
    anchors: Tensor  # [K]
    agreed: Tensor  # [K]


class Objective(nn.Module, ABC):
    """The loss over all draft depths. A module, so that it can be wrapped for several processes.

    embedding: the target's [V, H], for heads that read draft tokens. decay: the weight of each depth relative to the
    one before.
    """

    embedding: Tensor | None
    draft_ids: Tensor

    def __init__(self, head: Any, loss: str, embedding: Tensor | None, decay: float = DECAY) -> None:
        super().__init__()
        self.head, self.loss, self.decay = head, loss, decay
        self.register_buffer("embedding", None if embedding is None else embedding.detach(), persistent=False)
        draft_ids = torch.full((head.vocab_size,), -1)
        tokens = torch.arange(head.vocab_size) if head.token_map is None else head.token_map.cpu()
        draft_ids[tokens] = torch.arange(head.draft_size)
        self.register_buffer("draft_ids", draft_ids, persistent=False)  # [V] token id -> draft id, or -1

    def forward(self, batch: Batch) -> Loss:
        total = batch.features.new_zeros((), dtype=torch.float32)
        anchors, agreed = [], []
        for depth, (states, row, column) in enumerate(self.draft(batch)):
            loss, right = self._token_loss(batch, depth, states, row, column)
            total = total + self.decay**depth * (loss + self.feature_loss(batch, states, row, column))
            anchors.append(len(row))
            agreed.append(right.sum())
        return Loss(total, torch.tensor(anchors, device=total.device), torch.stack(agreed))

    @abstractmethod
    def draft(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each depth: the states [R, H] of its anchors, and the rows and columns [R] of their training targets."""

    def feature_loss(self, batch: Batch, states: Tensor, row: Tensor, column: Tensor) -> Tensor | float:
        """An additional loss of the states [R, H], a sum over anchors."""
        return 0.0

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings [..., H] of tokens [...]."""
        assert self.embedding is not None
        return nn.functional.embedding(tokens, self.embedding)

    def features(self, batch: Batch) -> Tensor:
        """The target's features [B, T, F] in the head's number format."""
        return batch.features.to(next(self.head.parameters()).dtype)

    def _token_loss(self, batch: Batch, depth: int, states: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, ...]:
        """The loss of the draft tokens of a depth, summed, and [R] bool: which most likely tokens were right."""
        labels, p = batch.labels[row, column], batch.probabilities[row, column]
        if self.loss == "ce":
            labels = batch.tokens[row, column + 1][:, None]
            p = torch.ones_like(labels, dtype=torch.float32)
        weight, bias = self.head.output_layer(depth)
        return vocabulary_loss(self.loss, self.head.normalise(states), weight, bias, self.draft_ids[labels], p)


class MedusaObjective(Objective):
    """The loss of a Medusa or Hydra head."""

    head: MedusaHead | HydraHead

    def draft(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        row, column = batch.answers.nonzero(as_tuple=True)
        features = self.features(batch)
        if isinstance(self.head, HydraHead):
            features = self.head.contextualize(features)
        features = features[row, column]
        answers = nn.functional.pad(batch.answers, (0, self.head.depth + 1))
        for depth in range(self.head.depth):
            inside = answers[row, column + 1 + depth]
            row, column, features = row[inside], column[inside], features[inside]
            if isinstance(self.head, MedusaHead):
                states = self.head.blocks[depth](features)
            else:
                drafted = column[:, None] + torch.arange(1, depth + 2, device=column.device)
                states = self.head(features, self.embed(batch.tokens[row[:, None], drafted]), depth)
            yield states, row, column + 1 + depth
