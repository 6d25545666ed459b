"""Rotary positions (RoPE; Su et al., 2021), with transformers' scalings to longer contexts.

Shapes: B rows, T tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SCALINGS = {  # the parameters of each type, in addition to the factor
    "linear": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}


@dataclass(frozen=True)
class RopeScaling:
    """A RoPE scaling, with transformers' names and meanings.

    Raises ValueError if the type is not in `SCALINGS` or lacks the original context length it needs.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None  # tokens; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1 (Peng et al., "YaRN", 2023, section 3.4)

    def __post_init__(self) -> None:
        if self.rope_type not in SCALINGS:
            raise ValueError(f"rope_type is {self.rope_type!r}; it can be default, {', '.join(SCALINGS)}")
        if self.rope_type != "linear" and self.original_max_position_embeddings is None:
            raise ValueError(f"rope_type {self.rope_type!r} needs original_max_position_embeddings")

    def describe(self) -> dict[str, str | float]:
        """The scaling as `rope_scaling` of a config, without the parameters that its type does not have."""
        values = {name: getattr(self, name) for name in ("rope_type", "factor", *SCALINGS[self.rope_type])}
        return {name: value for name, value in values.items() if value is not None}


class RotaryTable(NamedTuple):
    """What `rotate` takes."""

    cosines: Tensor  # [B, 1, T, D]
    sines: Tensor  # the same shape, signed

    def part(self, begin: int, end: int) -> RotaryTable:
        """The table of the positions from `begin` to `end`."""
        return RotaryTable(*(each[:, :, begin:end] for each in self))


def rotary_table(
    positions: Tensor, size: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype
) -> RotaryTable:
    """The `RotaryTable` for heads of `size` D at positions [B, T].

    Angles are computed in float32 or wider, because bfloat16 cannot represent position 257.
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequencies, strength = _find_frequencies(scaling, theta, size, wide, positions.device)
    angles = positions[:, None, :, None] * frequencies
    table = angles.cos(), angles.sin()
    cosines, sines = table if strength == 1 else (strength * part for part in table)
    return RotaryTable(cosines.to(dtype), sines.to(dtype))


def rotate(states: Tensor, table: RotaryTable) -> Tensor:
    """Rotate states [B, heads, T, D] by their positions' `rotary_table`.

    Elements i and i + D/2 of a head form a pair, as in Llama.
    """
    cosines, sines = table
    return torch.addcmul(states * cosines, states.roll(states.shape[-1] // 2, dims=-1), sines)


@torch.compiler.assume_constant_result  # torch.compile would compute them anew each time
def _find_frequencies(
    scaling: RopeScaling | None, theta: float, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, float]:
    """`_compute_frequencies`, once."""
    return _compute_frequencies(scaling, theta, size, dtype, device)


@lru_cache(maxsize=16)
@torch.inference_mode(mode=False)  # cached tensors must also work in training
def _compute_frequencies(
    scaling: RopeScaling | None, theta: float, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, float]:
    """Each element's frequency [D], and the factor that multiplies queries and keys.

    Those of the first half are negative. So the sine of an angle has the sign with which it multiplies the other half.
    """
    strength = 1.0
    if scaling is None:
        frequencies = theta ** -(torch.arange(size // 2, dtype=dtype, device=device) / (size // 2))
    else:
        config = LlamaConfig(hidden_size=size, num_attention_heads=1, head_dim=size)
        config.rope_parameters = {"rope_theta": theta, **scaling.describe()}
        frequencies, strength = ROPE_INIT_FUNCTIONS[scaling.rope_type](config, device)
    return torch.cat([-frequencies, frequencies]).to(dtype), float(strength)
