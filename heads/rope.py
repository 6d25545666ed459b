"""Rotary positions (RoPE; Su et al., 2021), and the three ways to stretch them over a longer context.

Shapes: B rows, T tokens, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SCALINGS = {  # and what each of them reads beside the factor
    "linear": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}


@dataclass(frozen=True)
class RopeScaling:
    """How angles are slowed, in transformers' words. Raises ValueError where the type is none of `SCALINGS`, or needs
    the length of the context that the frequencies were first trained for, and has none."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None  # tokens; of llama3 and yarn
    low_freq_factor: float = 1.0  # of llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # of yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None  # of yarn; None: as its paper recommends

    def __post_init__(self) -> None:
        if self.rope_type not in SCALINGS:
            raise ValueError(f"rope_type is {self.rope_type!r}; it can be default, {', '.join(SCALINGS)}")
        if self.rope_type != "linear" and self.original_max_position_embeddings is None:
            raise ValueError(f"rope_type {self.rope_type!r} needs original_max_position_embeddings")

    def describe(self) -> dict[str, str | float]:
        """What a config says of it."""
        said = {name: getattr(self, name) for name in ("rope_type", "factor", *SCALINGS[self.rope_type])}
        return {name: value for name, value in said.items() if value is not None}

    def slow(self, rates: Tensor, theta: float) -> Tensor:
        """The rates [D/2], divided by the factor for pairs that turn too rarely in the original context to be kept."""
        whole = self._choose_whole(rates, theta)
        return rates * (whole + (1 - whole) / self.factor)

    @property
    def strength(self) -> float:
        """What queries and keys are multiplied by (Peng et al., "YaRN", 2023, 3.4)."""
        if self.rope_type != "yarn":
            return 1.0
        return self.attention_factor or (0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0)

    def _choose_whole(self, rates: Tensor, theta: float) -> Tensor:
        """The share [D/2] of each pair's rate that stays as it is, 0 to 1."""
        if self.original_max_position_embeddings is None or self.rope_type == "linear":
            return torch.zeros_like(rates)
        context = self.original_max_position_embeddings / (2 * math.pi)
        if self.rope_type == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            return ((context * rates - low) / (high - low)).clamp(0, 1)
        size = 2 * len(rates)
        # the pairs that turn so often in the original context (YaRN, 3.2)
        often, rarely = (size * math.log(context / b, theta) / 2 for b in (self.beta_fast, self.beta_slow))
        first, last = max(math.floor(often), 0), min(math.ceil(rarely), size - 1)
        pairs = torch.arange(len(rates), dtype=rates.dtype, device=rates.device)
        return 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)


def rotate(states: Tensor, positions: Tensor, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Turn states [B, heads, T, D] by their positions [B, T] or [1, T].

    Numbers i and i + D/2 of a head are a pair, as in Llama. Angles are in float32 at least: bfloat16 has no 257.
    """
    half = states.shape[-1] // 2
    dtype = torch.promote_types(states.dtype, torch.float32)
    rates = theta ** -(torch.arange(half, dtype=dtype, device=states.device) / half)
    strength = 1.0
    if scaling is not None:
        rates, strength = scaling.slow(rates, theta), scaling.strength
    angles = positions[:, None, :, None] * rates  # [B, 1, T, D/2]
    cosine, sine = ((strength * part).to(states.dtype) for part in (angles.cos(), angles.sin()))
    first, second = states[..., :half], states[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
