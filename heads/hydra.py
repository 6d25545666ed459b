"""Hydra heads: like Medusa's, but head i also sees the tokens that were guessed before its own.

After Ankner et al., "Hydra" (2024). Shapes: K heads, H hidden size, D draft vocabulary, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.blocks import GroundedBlock, ResidualBlock
from heads.vocabulary import Output, VocabularyHead


@dataclass(frozen=True)
class HydraConfig:
    """The shape of a Hydra head. `target_layers` tells targets of one width apart; None where a file does not say."""

    hidden_size: int
    vocab_size: int
    heads: int = 4
    layers: int = 1  # blocks of a head, the grounded one included
    output: Output = "shared"
    draft_size: int | None = None  # None: the whole vocabulary
    output_bias: bool = False
    projected: bool = False  # see GroundedBlock
    target_layers: int | None = None
    target_name: str | None = None


class HydraHead(VocabularyHead):
    """K heads in sequence. Head i sees the feature of the last committed token and the embeddings of the i + 1 tokens
    after it, of which the first is chosen already and the others are guesses of the heads before."""

    features = (-1,)  # the hidden states that it reads, in transformers' numbering

    def __init__(self, config: HydraConfig) -> None:
        draft_size = config.draft_size or config.vocab_size
        super().__init__(
            config.heads, config.hidden_size, config.vocab_size, draft_size, config.output, config.output_bias
        )
        self.config, self.depth = config, config.heads
        self.grounded = nn.ModuleList(
            GroundedBlock(config.hidden_size, index + 2, config.projected) for index in range(config.heads)
        )
        self.blocks = nn.ModuleList(ResidualBlock(config.hidden_size, config.layers - 1) for _ in range(config.heads))

    def forward(self, features: Tensor, embedded: Tensor, index: int) -> Tensor:
        """The state [..., H] of head `index` for features [..., H] and the embeddings [..., index + 1, H] behind."""
        states = torch.cat([features, embedded.flatten(-2)], dim=-1)
        return self.blocks[index](self.grounded[index](states))
