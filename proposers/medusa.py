"""Drafting with Medusa, multi-token and Hydra heads, which read the last committed token's feature.

After Cai et al., "Medusa" (2024), Gloeckle et al., "Multi-token Prediction" (2024), and Ankner et al., "Hydra" (2024).
Shapes: B rows, T tokens, W paths, K heads, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from decode import Step, Target
from heads import LayerCache
from proposers.feature_history import FeaturePart
from proposers.head_proposer import HeadProposer
from proposers.tree_proposer import Inputs


class MedusaProposer(HeadProposer):
    """Drafts with a `MedusaHead`: one head a level, which does not see the tokens drafted before."""

    options = ("nodes",)
    usual_width = 32  # following a path costs nothing
    levelwise: ClassVar[bool] = False

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> MedusaDrafter:
        return MedusaDrafter(self.head, self.head(inputs["last"]))


class MultiTokenProposer(MedusaProposer):
    """Drafts with a `MultiTokenHead`, whose layers have read all features of the text."""

    def read_step(self, step: Step) -> Inputs:
        return self._look(super().read_step(step)["last"])

    def read_along(self, target: Target, features: Tensor, text: Tensor, begin: int, end: int) -> Inputs:
        return self._look(super().read_along(target, features, text, begin, end)["last"])

    def _look(self, last: Tensor) -> Inputs:
        cache = self._history.cache
        positions = cache.positions(1, last.device) - 1
        return {"states": self.head(last[:, None], positions, lambda queries, *_: cache.look(queries))[:, 0]}

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> MedusaDrafter:
        return MedusaDrafter(self.head, inputs["states"])


class MedusaDrafter:
    """Drafts one step from the states [B, K, H] of all levels."""

    def __init__(self, head: Any, states: Tensor) -> None:
        if head.output == "own":
            self._logits = torch.stack([head.logits(states[:, level], level) for level in range(head.depth)], dim=1)
        else:
            self._logits = head.logits(states, 0)  # [B, K, D]: one pass over the one matrix

    def logits(self, level: int) -> Tensor:
        return self._logits[:, level, None]

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        """All paths have the same logits."""


class HydraProposer(HeadProposer):
    """Drafts with a `HydraHead`, one pass of it a level: each head sees the tokens drafted before on its path.

    A prefix layer (Hydra++) attends to all features of a text.
    """

    options = ("nodes",)
    usual_width = 8

    @property
    def reads_keys_alone(self) -> bool:
        return True

    def read_features(self, target: Target, cache: LayerCache, part: FeaturePart, keys_alone: bool = False) -> Tensor:
        if keys_alone:
            return super().read_features(target, cache, part, keys_alone)
        features = part.features.to(self.dtype)
        positions = cache.positions(features.shape[1], features.device)
        states: Tensor = self.head.contextualize(features, positions, cache.attend)
        cache.keep(part.counts, part.counts_tensor)
        return states

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> HydraDrafter:
        return HydraDrafter(self.head, inputs["last"], inputs["roots"], self.embedding(target))


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
