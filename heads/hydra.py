"""Hydra heads: like Medusa's, but head i also reads the tokens drafted before its own.

Source: Ankner et al., "Hydra" (2024). Shapes: B rows, T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads.layer_cache import LayerCache
from heads.layers import DecoderLayer, LayerConfig, Norm, ResidualBlock
from heads.vocabulary import HeadConfig, Output, VocabularyHead


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

    def contextualize(
        self, features: Tensor, cache: LayerCache | None = None, counts: Sequence[int] | None = None
    ) -> Tensor:
        """The target's features [B, T, H] -> the heads' input [B, T, H], through the prefix layer if there is one.

        Without a cache, the features start at position 0 and can be padded on the right. With a cache, they follow
        its tokens, and it keeps the first counts[b] of each row (None: all).
        """
        if self.prefix is None:
            return features
        (batch, tokens), device = features.shape[:2], features.device
        if cache is None:
            states = self.prefix["layer"](features, torch.arange(tokens, device=device)[None])
        else:
            states = self.prefix["layer"](features, cache.positions(tokens, device), cache.attend)
            cache.keep([tokens] * batch if counts is None else counts)
        return self.prefix["norm"](states)

    def forward(self, features: Tensor, embedded: Tensor, index: int) -> Tensor:
        """Features [..., H] and embeddings [..., index + 1, H] of the next tokens -> head `index`'s state [..., H]."""
        states = torch.cat([features, embedded.flatten(-2)], dim=-1)
        grounded: Any = self.grounded[index]
        residual = grounded["residual"](states) if self.config.projected else features
        return self.blocks[index](residual + nn.functional.silu(grounded["linear"](states)))
