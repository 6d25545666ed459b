"""Medusa heads: head i guesses the token i + 2 ahead from the target's last hidden state alone.

After Cai et al., "Medusa" (2024). Shapes: K heads, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.layers import ResidualBlock
from heads.vocabulary import Output, VocabularyHead


@dataclass(frozen=True)
class MedusaConfig:
    """The shape of a Medusa head. `target_layers` tells targets of one width apart; None where a file does not say."""

    hidden_size: int
    vocab_size: int
    heads: int = 4
    layers: int = 1  # residual blocks of a head
    output: Output = "shared"
    draft_size: int | None = None  # None: the whole vocabulary
    bias: bool = True  # of the residual blocks
    target_layers: int | None = None
    target_name: str | None = None


class MedusaHead(VocabularyHead):
    """K independent heads on the feature of the last committed token; the target's own head guesses the token before.

    Parameters are named as vLLM's Medusa names them.
    """

    kind = "medusa"
    features = (-1,)  # the hidden states that it reads, in transformers' numbering
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        draft_size = config.draft_size or config.vocab_size
        super().__init__(config.heads, config.hidden_size, config.vocab_size, draft_size, config.output)
        self.config, self.depth = config, config.heads
        self.blocks = nn.ModuleList(
            ResidualBlock(config.hidden_size, config.layers, config.bias) for _ in range(config.heads)
        )

    def forward(self, features: Tensor) -> Tensor:
        """The state [..., K, H] of each head for features [..., H]; `logits(states[..., i, :], i)` are its logits."""
        return torch.stack([block(features) for block in self.blocks], dim=-2)
