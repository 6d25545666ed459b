"""Drafting with Hydra heads: level by level, and each head sees the tokens drafted before on its path.

After Ankner et al., "Hydra" (2024). Shapes: B rows, W paths, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from decode import Step, Target
from proposers.feature_history import pick_last_features
from proposers.gpu.draft_graphs import Inputs
from proposers.head_proposer import HeadProposer


class HydraProposer(HeadProposer):
    """Drafts with a `HydraHead`, one pass of it a level. A prefix layer (Hydra++) attends to all features of a text."""

    width = 8

    def read_step(self, step: Step) -> Inputs:
        def read(features: Tensor, tokens: Tensor, counts: list[int], on_device: Tensor | None) -> Tensor:
            return self.head.contextualize(features, self._history.cache, counts)

        return {"last": self._history.read(self.dtype, read) if self.reads_all_features else pick_last_features(step)}

    def is_fixed(self, inputs: Inputs) -> bool:
        return True

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> HydraDrafter:
        return HydraDrafter(self.head, inputs["last"].to(self.dtype), inputs["roots"], self.embedding(target))


class HydraDrafter:
    """Drafts one step from features [B, H] and roots [B]; `embed` maps tokens to the target's embeddings."""

    def __init__(self, head: Any, features: Tensor, roots: Tensor, embed: Callable[[Tensor], Tensor]) -> None:
        self.head, self.features, self.embed = head, features, embed
        self.paths = embed(roots[:, None])[:, :, None]  # [B, W, level + 1, H]

    def logits(self, level: int) -> Tensor:
        features = self.features[:, None].expand(-1, self.paths.shape[1], -1)
        return self.head.logits(self.head(features, self.paths, level), level)

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        index = parents[:, :, None, None].expand(-1, -1, *self.paths.shape[2:])
        self.paths = torch.cat([self.paths.gather(1, index), self.embed(tokens)[:, :, None]], dim=2)
