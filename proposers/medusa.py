"""Drafting with Medusa heads: all depths at once, from the last committed token's feature alone.

After Cai et al., "Medusa" (2024). Shapes: B rows, K heads, W paths, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode import Target
from heads import MedusaHead
from proposers.head_proposer import HeadProposer
from proposers.packed_head import Logits


class MedusaProposer(HeadProposer):
    """Drafts with a `MedusaHead`: each depth's tokens by one head, whatever is guessed before them."""

    width = 32  # the heads do not see the path, so that following one costs nothing

    def guess(self, features: Tensor, roots: Tensor, target: Target) -> MedusaGuesses:
        return MedusaGuesses(self.head, self.logits, features)


class MedusaGuesses:
    """One step's guesses for features [B, H]."""

    def __init__(self, head: MedusaHead, logits: Logits, features: Tensor) -> None:
        states = head(features)  # [B, K, H]
        if head.output == "own":
            self._logits = torch.stack([logits(states[:, level], level) for level in range(head.depth)], dim=1)
        else:
            self._logits = logits(states, 0)  # [B, K, D]: one pass over the one matrix
        self.tokens = head.tokens

    def logits(self, level: int) -> Tensor:
        return self._logits[:, level, None]

    def follow(self, origin: Tensor, tokens: Tensor) -> None:
        """The guesses are the same for all paths."""
