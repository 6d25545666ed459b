"""Medusa, Hydra and multi-token heads: head i drafts the token i + 2 ahead from the target's last hidden states.

Sources: Cai et al., "Medusa" (2024); Ankner et al., "Hydra" (2024); Gloeckle et al., "Better & Faster Large Language
Models via Multi-token Prediction" (2024). Shapes: B rows, N tokens, K heads, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from heads.layer_cache import Attend, attend
from heads.layers import DecoderLayer, LayerConfig, Norm, ResidualBlock
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
class HydraConfig(HeadConfig):
    """Sizes of a Hydra head."""

    heads: int = 4
    layers: int = 1  # blocks of each head, including the grounded one
    output: Output = "shared"
    output_bias: bool = False
    projected: bool = False  # the residual of the first block is a learned matrix, as published; else the feature
    embedding: bool = False  # its own token embeddings instead of the target's
    prefix: LayerConfig | None = None  # Hydra++: attention over the features of all tokens so far

    def __post_init__(self) -> None:
        if self.prefix is not None and self.prefix.window is not None:
            raise ValueError("a prefix layer attends to all tokens; leave out its window")


class HydraHead(VocabularyHead):
    """K heads in sequence. Head i reads the last committed token's feature, and the embeddings of the bonus token and
    the tokens that the i heads before it drafted."""

    kind = "hydra"
    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config, config.output, config.heads, config.output_bias)
        self.depth = config.heads
        size, parts = config.hidden_size, ["linear", "residual"] if config.projected else ["linear"]
        self.grounded = nn.ModuleList(  # the first block of each head, which reads a feature and index + 1 embeddings
            nn.ModuleDict({part: nn.Linear((index + 2) * size, size) for part in parts})
            for index in range(config.heads)
        )
        for name, parameter in self.grounded.named_parameters():
            (nn.init.eye_ if name.endswith("residual.weight") else nn.init.zeros_)(parameter)
        self.blocks = nn.ModuleList(ResidualBlock(config.hidden_size, config.layers - 1) for _ in range(config.heads))
        self.prefix: nn.ModuleDict | None = None
        self.reads_all_features = config.prefix is not None
        if config.prefix is not None:
            norm = Norm(config.hidden_size, config.prefix.rms_norm_eps)
            self.prefix = nn.ModuleDict({"layer": DecoderLayer(config.hidden_size, config.prefix), "norm": norm})

    def contextualize(self, features: Tensor, positions: Tensor | None = None, attend: Attend = attend) -> Tensor:
        """The target's features [B, N, H] -> the heads' input [B, N, H], through the prefix layer if there is one.

        positions [B, N]: None counts from 0. Features can be padded on the right.
        """
        if self.prefix is None:
            return features
        positions = torch.arange(features.shape[1], device=features.device)[None] if positions is None else positions
        return self.prefix["norm"](self.prefix["layer"](features, positions, attend))

    def read(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [B, G, N, D] of the prefix layer, from the target's features [B, N, H] at positions."""
        assert self.prefix is not None
        layer: Any = self.prefix["layer"]
        return layer.self_attn.keys_and_values(layer.input_layernorm(features), positions)

    def forward(self, features: Tensor, embedded: Tensor, index: int) -> Tensor:
        """Features [..., H] and embeddings [..., index + 1, H] of the next tokens -> head `index`'s state [..., H]."""
        states = torch.cat([features, embedded.flatten(-2)], dim=-1)
        grounded: Any = self.grounded[index]
        residual = grounded["residual"](states) if self.config.projected else features
        return self.blocks[index](residual + nn.functional.silu(grounded["linear"](states)))


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
