"""Drafting with Hydra heads: level by level, each guess knowing those before it on its path.

After Ankner et al., "Hydra" (2024). Shapes: B rows, W paths, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decode import Step, Target
from heads import HydraHead
from proposers.head_proposer import LevelwiseProposer, in_chunks, pick_last
from proposers.packed_head import Logits


class HydraProposer(LevelwiseProposer):
    """Drafts with a `HydraHead`, one pass of it a level. A prefix layer (Hydra++) has its own cache, a row a text."""

    width = 8

    def features(self) -> Tensor:
        """What the prefix layer, where there is one, makes of all that was committed since it last ran."""
        if self.head.prefix is None:
            return super().features()
        features, counts = self._hand_over()
        states = [self.head.contextualize(features[:, part], self._cache, kept) for part, kept in in_chunks(counts)]
        return pick_last(torch.cat(states, dim=1), counts)

    def ground(self, features: Tensor) -> Tensor:
        return self.head.contextualize(super().ground(features))

    def guess(self, features: Tensor, roots: Tensor, target: Target) -> HydraGuesses:
        return HydraGuesses(self.head, self.logits, features, roots, target.model.get_input_embeddings())

    def _collect(self, step: Step) -> None:
        if self.head.prefix is not None:
            super()._collect(step)


class HydraGuesses:
    """One step's guesses for features [B, H] and roots [B]; `embed` makes the target's embeddings of tokens."""

    def __init__(
        self, head: HydraHead, logits: Logits, features: Tensor, roots: Tensor, embed: Callable[[Tensor], Tensor]
    ) -> None:
        self.head, self.readout, self.tokens = head, logits, head.tokens
        self.features, self.embed = features, embed
        self.paths = self._embed(roots[:, None])[:, :, None]  # [B, W, level + 1, H]

    def logits(self, level: int) -> Tensor:
        features = self.features[:, None].expand(-1, self.paths.shape[1], -1)
        return self.readout(self.head(features, self.paths, level), level)

    def follow(self, origin: Tensor, tokens: Tensor) -> None:
        index = origin[:, :, None, None].expand(-1, -1, *self.paths.shape[2:])
        self.paths = torch.cat([self.paths.gather(1, index), self._embed(tokens)[:, :, None]], dim=2)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens).to(self.features.dtype)
