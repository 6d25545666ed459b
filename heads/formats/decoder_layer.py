"""What names, shapes and a config say of a decoder layer; shapes first, for published configs are wrong about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from heads.decoder_layer import LayerConfig
from heads.formats.layout import Said, Shapes, extent, number, section
from heads.rope import RopeScaling

VICUNA_HEAD_DIM = 128  # of the published Hydra++ heads, whose configs do not say it
ROPE_EXTRAS = {"rope_theta", "type", "truncate", "partial_rotary_factor"}  # what else may stand beside a scaling


def read_layer(shapes: Shapes, prefix: str, words: Said) -> LayerConfig:
    """The sizes of a decoder layer whose names begin so.

    What shapes do not say is as the words say, ours or transformers', or as in Vicuna. Raises ValueError where that
    does not fit the shapes, and where the layer is of a kind that is not known.
    """
    q, k, v = (f"{prefix}self_attn.{name}_proj.weight" for name in "qkv")
    wide, narrow = (extent(shapes, names, 0, VICUNA_HEAD_DIM) for names in ((q, k), (k, v, q)))
    head_dim = _read_head_dim(shapes, prefix, words, wide, narrow)
    if (act := words.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"its config says hidden_act: {act!r}; only silu can be loaded")
    theta = number(words, "rope_theta") or number(section(words, "rope_parameters"), "rope_theta")
    return LayerConfig(
        num_attention_heads=wide // head_dim,
        num_key_value_heads=narrow // head_dim,
        head_dim=head_dim,
        intermediate_size=extent(shapes, [f"{prefix}mlp.gate_proj.weight"], 0),
        rope_theta=theta or LayerConfig.rope_theta,
        rms_norm_eps=number(words, "rms_norm_eps") or LayerConfig.rms_norm_eps,
        input_norm=f"{prefix}input_layernorm.weight" in shapes,
        qkv_bias=any(f"{prefix}self_attn.{name}_proj.bias" in shapes for name in "qkv"),
        qk_norm=any(f"{prefix}self_attn.{name}_norm.weight" in shapes for name in "qk"),
        rope_scaling=_read_scaling(words),
    )


def _read_head_dim(shapes: Shapes, prefix: str, words: Said, wide: int, narrow: int) -> int:
    """The config's head_dim comes last: EAGLE's own code passes over it, and trains with hidden_size / heads."""
    norms = [f"{prefix}self_attn.{name}_norm.weight" for name in "qk"]
    heads = number(words, "num_attention_heads")
    shared = wide // heads if heads and wide % heads == 0 and narrow % (wide // heads) == 0 else None
    head_dim = extent(shapes, norms, 0, 0) or shared or number(words, "head_dim") or VICUNA_HEAD_DIM
    if wide % head_dim or narrow % head_dim:
        raise ValueError(
            f"{prefix}self_attn's matrices have {wide} and {narrow} rows, no multiples of a head of {head_dim}; "
            "its config must say the head_dim"
        )
    return int(head_dim)


def _read_scaling(words: Said) -> RopeScaling | None:
    """How rotary positions are stretched, in the older form (rope_scaling) or in transformers 5's (rope_parameters)."""
    said = section(words, "rope_scaling") or section(words, "rope_parameters")
    kind = said.get("rope_type") or said.get("type") or "default"
    known = [field.name for field in fields(RopeScaling)]
    strange = {name: value for name, value in said.items() if name not in {*known, *ROPE_EXTRAS} and value is not None}
    if kind == "default":  # then no other word counts, but those that are of kinds of layers with words of their own
        strange = {name: value for name, value in strange.items() if isinstance(value, Mapping)}
    if strange or said.get("partial_rotary_factor", 1) != 1 or not said.get("truncate", True):
        raise ValueError(f"its config says {dict(said)} of rotary positions; beside rope_theta only {known} are known")
    if kind == "default":
        return None
    given: dict[str, Any] = {name: value for name in known[1:] if (value := number(said, name)) is not None}
    if "factor" not in given:
        raise ValueError(f"its config says rope_type: {kind!r} without a factor")
    if kind != "linear" and (context := number(words, "max_position_embeddings")) is not None:
        given.setdefault("original_max_position_embeddings", context)
    return RopeScaling(kind, **given)


def describe_layer(config: LayerConfig) -> dict[str, Any]:
    """What transformers' configs, old and new, say of such a layer."""
    scaling = None if config.rope_scaling is None else config.rope_scaling.describe()
    return {
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta},
    }
