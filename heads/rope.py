"""Rotary positions (RoPE; Su et al., 2021), with transformers' scalings to longer contexts.

Shapes: B rows, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

NEEDED = {  # the parameters that each type of scaling needs, in addition to the factor
    "linear": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_position_embeddings",),
}
OPTIONAL = ("beta_fast", "beta_slow", "attention_factor")  # of yarn
Scaling: TypeAlias = Mapping[str, Any]  # a `rope_type` and its parameters, with transformers' names and meanings


def check_scaling(scaling: Scaling) -> None:
    """Raise ValueError if the type is unknown or lacks a parameter."""
    rope_type = scaling.get("rope_type")
    if rope_type not in NEEDED:
        raise ValueError(f"rope_type is {rope_type!r}; it can be default, {', '.join(NEEDED)}")
    if missing := [name for name in ("factor", *NEEDED[rope_type]) if name not in scaling]:
        raise ValueError(f"rope_type {rope_type!r} needs {', '.join(missing)}")


class RotaryTable(NamedTuple):
    """What `rotate` takes."""

    cosines: Tensor  # [B, 1, T, D]
    sines: Tensor  # the same shape, signed

    def part(self, begin: int, end: int) -> RotaryTable:
        """The table of the positions from `begin` to `end`."""
        return RotaryTable(*(each[:, :, begin:end] for each in self))


def rotate(states: Tensor, table: RotaryTable) -> Tensor:
    """Rotate states [B, heads, T, D] by the table of their positions.

    Elements i and i + D/2 of a head form a pair, as in Llama.
    """
    cosines, sines = table
    return torch.addcmul(states * cosines, states.roll(states.shape[-1] // 2, dims=-1), sines)


@torch.compiler.assume_constant_result  # torch.compile would compute them anew each time
def find_frequencies(
    scaling: Scaling | None, theta: float, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, float]:
    """Each of a head's D elements' frequency [D], and the factor that multiplies queries and keys.

    Those of the first half are negative. So the sine of an angle has the sign with which it multiplies the other half.
    """
    return _compute_frequencies(scaling and tuple(scaling.items()), theta, size, dtype, device)


@lru_cache(maxsize=16)
@torch.inference_mode(mode=False)  # cached tensors must also work in training
def _compute_frequencies(scaling: Any, theta: float, size: int, dtype: Any, device: Any) -> tuple[Tensor, float]:
    strength = 1.0
    if scaling is None:
        frequencies = theta ** -(torch.arange(size // 2, dtype=dtype, device=device) / (size // 2))
    else:
        config = LlamaConfig(hidden_size=size, num_attention_heads=1, head_dim=size)
        config.rope_parameters = {"rope_theta": theta, **dict(scaling)}
        frequencies, strength = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, device)
    return torch.cat([-frequencies, frequencies]).to(dtype), float(strength)
