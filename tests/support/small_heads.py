"""Heads of a few weights in float64, and what their decoder layers must compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from heads import LayerConfig
from tests.support.drafting import draw_head

HIDDEN, VOCABULARY = 8, 13
LAYER = LayerConfig(6, 2, 4, 10, rope_theta=50.0, rms_norm_eps=1e-3)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.5, "high_freq_factor": 4.0}


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(kind: str, *, layer: Mapping[str, Any] = {}, **settings: Any) -> Any:
    """A random head, which has borrowed the target's output matrix if it needs it. layer: what differs from `LAYER`."""
    if kind.startswith("eagle"):
        settings["layer"] = replace(LAYER, **{"input_norm": kind == "eagle3", **layer})
    if kind in ("multi-token", "peagle", "dflash", "jump"):
        settings["layer"] = replace(LAYER, **{"qk_norm": kind == "dflash", **layer})
    if kind in ("eagle3", "peagle", "dflash"):
        settings = {"features": (2, 5, 9), **settings}
    head = draw_head(kind, HIDDEN, VOCABULARY, **settings)
    if head.output == "target":
        head.borrow(drawn(VOCABULARY, HIDDEN, seed=7))
    return head


def assert_same(loaded: Any, head: Any) -> None:
    """Config, weights and token map are equal, to the bit, and the loaded weights can be trained."""
    assert type(loaded) is type(head) and loaded.config == head.config
    torch.testing.assert_close(loaded.state_dict(), head.state_dict(), rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in loaded.parameters())


class PlainLayer:
    """A decoder layer written from its definition: one row, all tokens so far in one pass, without cache or batch."""

    def __init__(self, config: LayerConfig, states: Mapping[str, Tensor], prefix: str) -> None:
        self.config = config
        self.weights = {name.removeprefix(prefix): tensor.detach() for name, tensor in states.items()}

    def multiply(self, name: str, states: Tensor) -> Tensor:
        product = states @ self.weights[f"{name}.weight"].T
        return product + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else product

    def norm(self, name: str, states: Tensor) -> Tensor:
        """Unchanged if there is no such norm."""
        if f"{name}.weight" not in self.weights:
            return states
        size = (states.square().mean(dim=-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        return states / size * self.weights[f"{name}.weight"]

    def project(self, name: str, inputs: Tensor) -> Tensor:
        """Queries, keys or values, [T, heads, D]."""
        size = self.config.head_dim
        parts = self.multiply(f"self_attn.{name}_proj", inputs).unflatten(-1, (-1, size))
        if name == "v":
            return parts
        frequencies = self.config.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = (torch.arange(len(inputs))[:, None] * frequencies)[:, None]  # [T, 1, D/2]
        first, second = self.norm(f"self_attn.{name}_norm", parts).split(size // 2, dim=-1)
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)

    def run(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """The residual [T, H], and the input of the attention, which may be wider -> [T, H]."""
        queries, keys, values = (self.project(name, inputs) for name in "qkv")
        shared = self.config.num_attention_heads // self.config.num_key_value_heads
        keys, values = (part.repeat_interleave(shared, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / self.config.head_dim**0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(dim=-1), values)
        states = residual + self.multiply("self_attn.o_proj", mixed.flatten(1))
        gate, up = (
            self.multiply(f"mlp.{name}_proj", self.norm("post_attention_layernorm", states)) for name in ("gate", "up")
        )
        return states + self.multiply("mlp.down_proj", silu(gate) * up)


def silu(states: Tensor) -> Tensor:
    return states / (1 + (-states).exp())


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=0, atol=1e-12)
