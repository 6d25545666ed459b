"""FlashMap heads as their authors publish them, read for the jump from noise to tokens.

In a published network, each norm of the layers is scaled and shifted and each sublayer's output is gated, by functions
of the times that a jump begins and ends at. For one jump these are constants: the norms' own weights, and factors of
the output matrices. Rotary positions turn elements 2i and 2i + 1 of a head there, i and i + D/2 here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.nn.functional import silu

from heads.flashmap import FlashMapConfig
from heads.formats.decoder_layer import READ_FROM_0, check_width, read_layer_list
from heads.formats.layout import (
    ConfigDict,
    Format,
    Layout,
    TargetSizes,
    count,
    extent,
    find_shapes,
    number,
    read_common,
)
from heads.layers import LayerConfig

JUMP = {"time_embed": 0.0, "jump_embed": 1.0}  # the times that the jump begins and ends at
SLOWEST = 10_000.0  # period of the time features
OUTPUTS = {  # what the gate of a sublayer multiplies
    **{part: (f"{part}.o_proj.weight",) for part in ("self_attn", "cross_attn")},
    "mlp": ("mlp.fc2.weight", "mlp.fc2.bias"),
}
NEEDED = "block_size", "num_attention_heads"


def is_flashmap(names: Collection[str]) -> bool:
    """Whether a file with these names of tensors has a FlashMap head."""
    return {"noise_gate", "x_embed.weight", "jump_embed.linear_1.weight"} <= {*names}


def read_flashmap(tensors: Mapping[str, Tensor], config: ConfigDict, target: TargetSizes) -> Layout:
    """The layout of a FlashMap head, with its tensors by our names."""
    shapes = find_shapes(tensors)
    if (steps := config.get("num_steps", 1)) != 1:
        raise ValueError(f"its config has num_steps: {steps!r}; drafts take one jump: write 1")
    if missing := [name for name in NEEDED if not number(config, name)]:
        raise ValueError(f"its config lacks {' and '.join(missing)}")
    size, width = extent(shapes, ["state_norm.weight"], 0), extent(shapes, ["hidden_norm.weight"], 0)
    features = read_layer_list(READ_FROM_0, config.get(READ_FROM_0), 1, target.layers)
    check_width(READ_FROM_0, features, 1, extent(shapes, ["fc.weight"], 1), size)
    head_dim = extent(shapes, ["layers.0.self_attn.q_norm.weight"], 0)
    heads = width // head_dim
    if (told := number(config, "num_attention_heads")) != heads or width % head_dim or head_dim % 2:
        raise ValueError(
            f"its config has num_attention_heads: {told}, its layers {width} channels in heads of {head_dim}"
        )
    layer = LayerConfig(
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        intermediate_size=extent(shapes, ["layers.0.mlp.fc1.weight"], 0),
        rope_theta=number(config, "rope_theta") or LayerConfig.rope_theta,
        rms_norm_eps=number(config, "qk_norm_eps") or 1e-5,
        qk_norm=True,
    )
    eps = {name: value for name in ("rms_norm_eps", "layer_norm_eps") if (value := number(config, name))}
    head_config = FlashMapConfig(
        **read_common(shapes, size, [], config, target.vocab_size),
        layer=layer,
        features=features,
        width=width,
        heads=int(config["block_size"]),
        layers=(count("layers.{}.self_attn.q_proj.weight", shapes) or (0,))[0],
        **eps,
    )
    try:
        return Layout(head_config, tensors=_fix_times(tensors, head_config, number(config, "time_scale") or 1000.0))
    except KeyError as error:
        raise ValueError(f"missing: {error.args[0]}") from error
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"wrong: its tensors do not fit together ({str(error).partition(chr(10))[0]})") from error


def _fix_times(tensors: Mapping[str, Tensor], config: FlashMapConfig, scale: float) -> dict[str, Tensor]:
    """The tensors of one jump. scale: of its times."""
    found = dict(tensors)
    time = silu(sum((_embed_time(found, name, scale * time) for name, time in JUMP.items()), torch.zeros(())))
    found["noise_norm.weight"] = _widen(found["noise_norm.weight"]) * _widen(found.pop("noise_gate"))
    _fix_norm(found, "final_adaln", "norm", time)
    for index in range(config.layers):
        layer = f"layers.{index}."
        for part, outputs in OUTPUTS.items():
            gate = _fix_norm(found, f"{layer}{part}_adaln", f"{layer}{part}_norm", time)
            for name in outputs:
                found[layer + name] = torch.einsum("w,w...->w...", gate, _widen(found[layer + name]))
            if part != "mlp":
                _reorder_heads(found, f"{layer}{part}.", config.layer)
    return found


def _embed_time(found: dict[str, Tensor], name: str, time: float) -> Tensor:
    """The embedding [cond] of a time by the network of this name, whose tensors are taken out."""
    first, second = ([_widen(found.pop(f"{name}.linear_{i}.{part}")) for part in ("weight", "bias")] for i in (1, 2))
    half = first[0].shape[1] // 2
    angles = time * torch.exp(-math.log(SLOWEST) * torch.arange(half, dtype=first[0].dtype) / half)
    inputs = torch.cat([angles.cos(), angles.sin()])
    return torch.addmv(second[1], second[0], silu(torch.addmv(first[1], first[0], inputs)))


def _fix_norm(found: dict[str, Tensor], name: str, ours: str, time: Tensor) -> Tensor:
    """Replace the modulation of a norm by weights of the norm. Returns the gate [W] of what follows it."""
    weight, bias = (_widen(found.pop(f"{name}.linear.{part}")) for part in ("weight", "bias"))
    scale, shift, gate = torch.addmv(bias, weight, time).chunk(3)
    found |= {f"{ours}.weight": 1 + scale, f"{ours}.bias": shift.clone()}
    return gate


def _reorder_heads(found: dict[str, Tensor], prefix: str, layer: LayerConfig) -> None:
    """Sort the elements of queries and keys as our rotary positions turn them, in place."""
    order = torch.arange(layer.head_dim).view(-1, 2).T.flatten()
    for name in "qk":
        rows = found[f"{prefix}{name}_proj.weight"].unflatten(0, (layer.num_attention_heads, -1))
        found[f"{prefix}{name}_proj.weight"] = rows[:, order].flatten(0, 1)
        found[f"{prefix}{name}_norm.weight"] = found[f"{prefix}{name}_norm.weight"][order]


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


FLASHMAP = Format(is_flashmap, read_flashmap)
