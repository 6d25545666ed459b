"""Rotary positions (RoPE; Su et al., 2021), with transformers' scalings to longer contexts.

Shapes: B rows, T tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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


def rotate(states: Tensor, positions: Tensor, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Rotate states [B, heads, T, D] by their positions [B, T] or [1, T].

    Elements i and i + D/2 of a head form a pair, as in Llama. Angles are computed in float32 or wider, because
    bfloat16 cannot represent position 257.
    """
    half = states.shape[-1] // 2
    dtype = torch.promote_types(states.dtype, torch.float32)
    if scaling is None:
        frequencies, strength = theta ** -(torch.arange(half, dtype=dtype, device=states.device) / half), 1.0
    else:
        frequencies, strength = _scale(scaling, theta, 2 * half, states.device)
    angles = positions[:, None, :, None] * frequencies.to(dtype)  # [B, 1, T, D/2]
    cosine, sine = ((strength * part).to(states.dtype) for part in (angles.cos(), angles.sin()))
    first, second = states[..., :half], states[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


@lru_cache(maxsize=16)
@torch.inference_mode(mode=False)  # cached tensors must also work in training
def _scale(scaling: RopeScaling, theta: float, head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """transformers' scaled frequencies [D/2], and the factor that multiplies queries and keys."""
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim)
    config.rope_parameters = {"rope_theta": theta, **scaling.describe()}
    frequencies, strength = ROPE_INIT_FUNCTIONS[scaling.rope_type](config, device)
    return frequencies, float(strength)
