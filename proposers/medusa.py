"""Drafting with Medusa heads: all levels at once, from the last committed token's feature alone.

After Cai et al., "Medusa" (2024). Shapes: B rows, K heads, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from decode import Step, Target
from proposers.feature_history import pick_last_features
from proposers.gpu.draft_graphs import Inputs
from proposers.head_proposer import HeadProposer


class MedusaProposer(HeadProposer):
    """Drafts with a `MedusaHead`: one head a level, which does not see the tokens drafted before."""

    width = 32  # following a path costs nothing
    levelwise: ClassVar[bool] = False

    def read_step(self, step: Step) -> Inputs:
        return {"last": pick_last_features(step)}

    def is_fixed(self, inputs: Inputs) -> bool:
        return True

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> MedusaDrafter:
        return MedusaDrafter(self.head, inputs["last"].to(self.dtype))


class MedusaDrafter:
    """Drafts one step from features [B, H]."""

    def __init__(self, head: Any, features: Tensor) -> None:
        states = head(features)  # [B, K, H]
        if head.output == "own":
            self._logits = torch.stack([head.logits(states[:, level], level) for level in range(head.depth)], dim=1)
        else:
            self._logits = head.logits(states, 0)  # [B, K, D]: one pass over the one matrix

    def logits(self, level: int) -> Tensor:
        return self._logits[:, level, None]

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        """All paths have the same logits."""
