"""Medusa and multi-token heads: head i drafts the token i + 2 ahead from the target's last hidden states alone.

Sources: Cai et al., "Medusa" (2024); Gloeckle et al., "Better & Faster Large Language Models via Multi-token
Prediction" (2024). Shapes: B rows, N tokens, K heads, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from heads.layer_cache import Attend, attend
from heads.layers import DecoderLayer, LayerConfig, ResidualBlock
from heads.vocabulary import HeadConfig, Output, VocabularyHead


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """Sizes of a Medusa head."""

    heads: int = 4
    layers: int = 1  # residual blocks of each head
    output: Output = "shared"
    bias: bool = True  # of the residual blocks


class MedusaHead(VocabularyHead):
    """K independent heads on the feature of the last committed token.

    The target itself predicts the next token, so head 0 predicts the one after it. Parameters are named as in vLLM.
    """

    kind = "medusa"
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config, config.output, config.heads)
        self.depth = config.heads
        self.blocks = nn.ModuleList(
            ResidualBlock(config.hidden_size, config.layers, config.bias) for _ in range(config.heads)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Features [..., H] -> each head's state [..., K, H]. `logits(states[..., i, :], i)` gives head i's logits."""
        return torch.stack([block(features) for block in self.blocks], dim=-2)


@dataclass(frozen=True)
class MultiTokenConfig(HeadConfig):
    """Sizes of multi-token heads."""

    layer: LayerConfig
    heads: int = 4
    output: Output = "shared"


class MultiTokenHead(VocabularyHead):
    """Medusa heads that are decoder layers: each attends to the target's states of the whole text (Gloeckle et al.)."""

    kind = "multi-token"
    reads_all_features = True
    config: MultiTokenConfig

    def __init__(self, config: MultiTokenConfig) -> None:
        super().__init__(config, config.output, config.heads)
        self.depth = config.heads
        self.blocks: Any = nn.ModuleList(DecoderLayer(config.hidden_size, config.layer) for _ in range(config.heads))

    def read(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [B, K x G, N, D] of features [B, N, H] at positions [B, N], those of all heads."""
        table = self.config.layer.rotary_table(positions, features.dtype)
        parts = (block.self_attn.keys_and_values(block.input_layernorm(features), table) for block in self.blocks)
        keys, values = zip(*parts, strict=True)
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)

    def forward(self, features: Tensor, positions: Tensor, attend: Attend = attend) -> Tensor:
        """Features [B, N, H] at positions [B, N] or [1, N] -> each head's state [B, N, K, H].

        attend: called once, with the queries, keys and values of all heads.
        """
        parts = (block.self_attn.project(block.input_layernorm(features), positions) for block in self.blocks)
        mixed = attend(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))
        results = zip(self.blocks, mixed.chunk(self.depth, dim=1), strict=True)
        return torch.stack([block.finish(features, part) for block, part in results], dim=2)


def widen_medusa(head: MedusaHead) -> MedusaHead:
    """A copy with the whole vocabulary and no token map, for servers that load none. It drafts the same tokens.

    The output row of a token outside the draft vocabulary is the mean of the other rows. Its logit is then the mean of
    their logits and never the largest; the logit of a row of zeros often would be.
    """
    output: Output = "own" if head.output == "own" else "shared"
    wide = MedusaHead(replace(head.config, draft_size=None, output=output)).to(next(head.parameters()).dtype)
    wide.blocks.load_state_dict(head.blocks.state_dict())
    for index, linear in enumerate(wide._output_layers()):
        rows = head.output_layer(index)[0].detach()
        matrix = rows.float().mean(dim=0).to(rows.dtype).repeat(head.vocab_size, 1)
        matrix[slice(None) if head.token_map is None else head.token_map] = rows
        linear.weight.data = matrix
    return wide
