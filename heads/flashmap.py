"""FlashMap heads: a flow map that takes Gaussian noise to a whole block of tokens in one jump.

Source: Shen et al., FlashMap 0.1.0 (2026), after "Flow Map Language Models" (2026, arXiv 2602.16813). A published
network jumps between any two times of its flow. This one has a single jump, from noise to tokens: the times are part of
its weights (`heads.formats.flashmap`). Shapes: B rows, N tokens, L draft tokens, W the layers' width, H the target's
hidden size, K layers that are read, G heads of a layer, D head size, V vocabulary, M draws of noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from heads.eagle import check_block, check_features
from heads.layer_cache import Attend
from heads.layers import Attention, LayerConfig, Norm, RotaryTable
from heads.vocabulary import HeadConfig, VocabularyHead

DRAWS = 256  # of noise; a slot takes one by its position


@dataclass(frozen=True)
class FlashMapConfig(HeadConfig):
    """Sizes of a FlashMap head. hidden_size: the target's, as in other configs.

    layer: sizes of a layer; its eps is that of queries and keys. features: as for EAGLE-3. width: of the layers. heads:
    draft tokens of a block. rms_norm_eps: of what is read; layer_norm_eps: in the layers.
    """

    layer: LayerConfig
    features: tuple[int, ...]
    width: int
    heads: int
    layers: int
    rms_norm_eps: float = 1e-6
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_features(self.features)
        check_block(0, self.vocab_size, heads=self.heads, layers=self.layers)


class FlowLayer(nn.Module):
    """Attention among the slots of a block, attention to the text, and a feed-forward network."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        width, inner = config.width, config.layer.intermediate_size
        norms = (nn.LayerNorm(width, eps=config.layer_norm_eps) for _ in range(3))
        self.self_attn_norm, self.cross_attn_norm, self.mlp_norm = norms
        self.self_attn, self.cross_attn = (Attention(width, config.layer, 1) for _ in range(2))
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

    def forward(self, states: Tensor, table: RotaryTable, attend: Attend) -> Tensor:
        """States [B, L, W] of slots. attend: from queries [B, G, L, D] to what attention to the text gives for them."""
        block = self.self_attn.project(self.self_attn_norm(states), table)
        mixed = nn.functional.scaled_dot_product_attention(*block)
        states = states + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(-2))
        mixed = attend(self.cross_attn.queries(self.cross_attn_norm(states), table))
        states = states + self.cross_attn.o_proj(mixed.transpose(1, 2).flatten(-2))
        return states + self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](self.mlp_norm(states))))


class FlashMapHead(VocabularyHead):
    """Predicts the tokens after an anchor, the last known token, from it and the features of all tokens before it.

    Parameters are named as published, but for the norms of the layers.
    """

    kind = "flashmap"
    reads_all_features = True
    config: FlashMapConfig
    starts: Tensor | None  # [M, W] what the layers begin with, for each draw of the noise

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__(config, "target")
        size, width, eps = config.hidden_size, config.width, config.rms_norm_eps
        self.features, self.depth = config.features, config.heads
        self.fc = nn.Linear(len(config.features) * size, width, bias=False)
        self.anchor_proj, self.x_embed = (nn.Linear(size, width) for _ in range(2))
        self.head = nn.Linear(width, size)
        self.hidden_norm, self.anchor_norm = Norm(width, eps), Norm(width, eps)
        self.state_norm, self.noise_norm = Norm(size, eps), Norm(size, eps)
        self.layers: Any = nn.ModuleList(FlowLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.register_buffer("starts", None, persistent=False)

    @torch.no_grad()
    def draw(self, embeddings: Tensor) -> None:
        """Draw the noise for a target with these embeddings [V, H].

        A block begins as noise x [L, V], which the network reads as x E. Drawing some rows of x E in advance saves two
        products with E in each step. They are the same on each device and for each seed: the draft of a text is too.
        """
        generator, wide = torch.Generator().manual_seed(0), torch.promote_types(embeddings.dtype, torch.float32)
        noise = torch.zeros(DRAWS, embeddings.shape[1], dtype=wide, device=embeddings.device)
        for rows in embeddings.split(1 << 14):
            noise += torch.randn(DRAWS, len(rows), generator=generator).to(noise) @ rows.to(wide)
        self.starts = self.start(embeddings.mean(dim=0, dtype=wide), noise)

    def start(self, mean: Tensor, noise: Tensor) -> Tensor:
        """What the layers begin with [..., W], by x E [..., H]. mean [H]: of E, as before any token is known."""
        dtype = self.noise_norm.weight.dtype
        started: Tensor = self.x_embed(self.state_norm(mean.to(dtype)) + self.noise_norm(noise.to(dtype)))
        return started

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [B, N, K x H], lowest layer first -> fused features [B, N, W]."""
        return self.hidden_norm(self.fc(features))

    def fuse_anchor(self, embedded: Tensor) -> Tensor:
        """The embeddings [B, 1, H] of anchors -> what stands for their features [B, 1, W]."""
        return self.anchor_norm(self.anchor_proj(embedded))

    def read(self, fused: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [B, layers x G, N, D] of fused features at positions [B, N], those of all layers."""
        table = self.config.layer.rotary_table(positions, fused.dtype)
        keys, values = zip(*(layer.cross_attn.keys_and_values(fused, table) for layer in self.layers), strict=True)
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)

    def forward(self, positions: Tensor, attend: Attend) -> Tensor:
        """States [B, L, W] of the slots at positions [B, L]. attend: attention to the text and the anchor."""
        assert self.starts is not None
        states = self.starts[positions % len(self.starts)]
        table = self.config.layer.rotary_table(positions, states.dtype)
        for number, layer in enumerate(self.layers):
            states = layer(states, table, partial(attend, layer=number))
        return states

    def normalise(self, states: Tensor) -> Tensor:
        """States [..., W] -> the input [..., H] of the output matrix."""
        found: Tensor = self.head(self.norm(states))
        return found
