"""Layers that several heads share. The decoder layer is a Llama model's, for Hydra++'s prefix attention and EAGLE.

Its parameters are named as in transformers, and so are the scalings of its rotary positions (RoPE; Su et al., 2021).
Shapes: B rows, T tokens, H hidden size, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from heads.layer_cache import Attend, attend

NEEDED = {  # the parameters that each type of scaling needs, in addition to the factor
    "linear": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_position_embeddings",),
}
OPTIONAL = ("beta_fast", "beta_slow", "attention_factor")  # of yarn
Scaling: TypeAlias = Mapping[str, Any]  # a `rope_type` and its parameters, with transformers' names and meanings


class RotaryTable(NamedTuple):
    """What `rotate` takes."""

    cosines: Tensor  # [B, 1, T, D]
    sines: Tensor  # the same shape, signed

    def part(self, begin: int, end: int) -> RotaryTable:
        """The table of the positions from `begin` to `end`."""
        return RotaryTable(*(each[:, :, begin:end] for each in self))


Positions: TypeAlias = Tensor | RotaryTable  # of tokens, or the table of these positions if it is known already


@dataclass(frozen=True)
class LayerConfig:
    """Sizes of a decoder layer, named as in transformers. Raises ValueError if they do not fit together."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    input_norm: bool = True  # before attention; not needed if the layer's input is normed already
    qkv_bias: bool = False  # of queries, keys and values, as in Qwen2
    qk_norm: bool = False  # of each head's queries and keys before rotation, as in Qwen3
    rope_scaling: Scaling | None = None
    window: int | None = None  # tokens that a token attends to, itself included; None: all before it

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; a token attends to one at least")
        queries, keys = self.num_attention_heads, self.num_key_value_heads
        if queries % keys:
            raise ValueError(f"{queries} attention heads cannot share {keys} key-value heads; use a multiple of {keys}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary positions need an even number")
        if self.rope_scaling is not None:
            rope_type = self.rope_scaling.get("rope_type")
            if rope_type not in NEEDED:
                raise ValueError(f"rope_type is {rope_type!r}; it can be default, {', '.join(NEEDED)}")
            if missing := [name for name in ("factor", *NEEDED[rope_type]) if name not in self.rope_scaling]:
                raise ValueError(f"rope_type {rope_type!r} needs {', '.join(missing)}")

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
        """See `find_frequencies`, for states of this dtype.

        Angles are computed in float32 or wider, because bfloat16 cannot represent position 257.
        """
        wide = torch.promote_types(dtype, torch.float32)
        return find_frequencies(self.rope_scaling, self.rope_theta, self.head_dim, wide, device)

    def rotary_table(self, positions: Tensor, dtype: torch.dtype, frequencies: Tensor | None = None) -> RotaryTable:
        """The table of positions [B, T], for states of this dtype. frequencies [D]: if they are at hand."""
        known, strength = self.frequencies(dtype, positions.device)
        angles = positions[:, None, :, None] * (known if frequencies is None else frequencies)
        table = angles.cos(), angles.sin()
        return RotaryTable(*((part if strength == 1 else strength * part).to(dtype) for part in table))


class DecoderLayer(nn.Module):
    """Attention, then a gated feed-forward network, each with a norm before it and a residual connection.

    A new layer is the identity: the last matrix of both halves is zero. inputs: states whose concatenation the
    attention reads, as in `Attention`.
    """

    def __init__(self, hidden_size: int, config: LayerConfig, inputs: int = 1) -> None:
        super().__init__()
        self.input_layernorm = make_norm(hidden_size, config.rms_norm_eps, config.input_norm)
        self.self_attn = Attention(hidden_size, config, inputs)
        self.post_attention_layernorm = Norm(hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(hidden_size, config.intermediate_size)

    def forward(self, states: Tensor, positions: Positions, attend: Attend = attend) -> Tensor:
        """States [B, T, H] at positions [B, T] or [1, T] -> [B, T, H]."""
        return self.add(states, self.input_layernorm(states), positions, attend)

    def add(self, residual: Tensor, inputs: Tensor, positions: Positions, attend: Attend) -> Tensor:
        """Add both halves to a residual [B, T, H]. inputs [B, T, inputs x H]: normed, for the attention."""
        return self.finish(residual, attend(*self.self_attn.project(inputs, positions)))

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Add both halves to a residual [B, T, H]. mixed [B, Q, T, D]: what attention returns."""
        states = residual + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(-2))
        return states + self.mlp(self.post_attention_layernorm(states))


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions. `inputs` states are concatenated."""

    def __init__(self, hidden_size: int, config: LayerConfig, inputs: int) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.num_attention_heads, config.num_key_value_heads
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(inputs * hidden_size, heads * config.head_dim, bias=config.qkv_bias)
            for heads in (queries, keys, keys)
        )
        self.o_proj = nn.Linear(queries * config.head_dim, hidden_size, bias=False)
        self.q_norm, self.k_norm = (make_norm(config.head_dim, config.rms_norm_eps, config.qk_norm) for _ in "qk")
        nn.init.zeros_(self.o_proj.weight)

    def project(self, states: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """States [B, T, inputs x H] -> queries [B, Q, T, D], keys and values [B, G, T, D], as `Attend` takes them."""
        queries = self.q_proj(states)
        table = positions if isinstance(positions, RotaryTable) else self.config.rotary_table(positions, queries.dtype)
        return self._turn(queries, self.q_norm, table), *self.keys_and_values(states, table)

    def keys_and_values(self, states: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """States [B, T, inputs x H] -> keys and values [B, G, T, D], as `project` computes them."""
        table = positions if isinstance(positions, RotaryTable) else self.config.rotary_table(positions, states.dtype)
        return self._turn(self.k_proj(states), self.k_norm, table), self._split(self.v_proj(states))

    def queries(self, states: Tensor, table: RotaryTable) -> Tensor:
        """States [B, T, inputs x H] -> queries [B, Q, T, D], rotated by the table of their positions."""
        return self._turn(self.q_proj(states), self.q_norm, table)

    def _turn(self, projected: Tensor, norm: nn.Module, table: RotaryTable) -> Tensor:
        """Heads apart, normed and rotated."""
        heads = self._split(projected)
        return rotate(norm(heads).to(heads.dtype), table)

    def _split(self, states: Tensor) -> Tensor:
        """Heads apart: [B, heads, T, D]."""
        return states.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """W_down (SiLU(W_gate x) * W_up x) (Shazeer, 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden_size, intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(states)) * self.up_proj(states))


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its weights; under autocast its input can have a narrower one."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.to(self.weight.dtype))


def make_norm(size: int, eps: float, wanted: bool) -> nn.Module:
    """A `Norm` if `wanted`, else the identity."""
    return Norm(size, eps) if wanted else nn.Identity()


class ResidualBlock(nn.Module):
    """`layers` times x + SiLU(W x + b) (Medusa, section 2.1.1). A new block is the identity: W and b are zero."""

    def __init__(self, hidden_size: int, layers: int, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        for layer in self.layers:
            states = states + nn.functional.silu(layer(states))
        return states


def rotate(states: Tensor, table: RotaryTable) -> Tensor:
    """Rotate states [B, heads, T, D] by the table of their positions.

    Elements i and i + D/2 of a head form a pair, as in Llama.
    """
    cosines, sines = table
    return torch.addcmul(states * cosines, states.roll(states.shape[-1] // 2, dims=-1), sines)


@torch.compiler.assume_constant_result  # torch.compile would compute them anew each time
def find_frequencies(scaling: Scaling | None, theta: float, size: int, dtype: Any, device: Any) -> tuple[Tensor, float]:
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
