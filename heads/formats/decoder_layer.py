"""A decoder layer's sizes, and the target's layers that a head reads, from names, shapes and config. Shapes come first,
because published configs are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heads.dflash import DFlashConfig
from heads.eagle import Eagle3Config, EagleConfig
from heads.formats.layout import ConfigDict, Shapes, extent, number, section
from heads.layers import NEEDED, OPTIONAL, LayerConfig, Scaling

VICUNA_HEAD_DIM = 128  # of the published Hydra++ heads, whose configs lack it
# What rotary positions can have in addition to a scaling's parameters.
OTHER_ROPE_KEYS = {"rope_type", "rope_theta", "type", "truncate", "partial_rotary_factor"}
FULL, WINDOWED = "full_attention", "sliding_attention"  # transformers' names of layers, by what they attend to
LAYER = "layers.0."  # begins the names of the first layer's tensors
NESTED = "transformer_layer_config"  # speculators' sizes of the layers
READ_FROM_0 = "target_layer_ids"  # the layers that a head reads, numbered by the one that outputs them
LONGEST = 131_072  # tokens; max_position_embeddings for servers if the target's limit is unknown


def read_layer(shapes: Shapes, prefix: str, config: ConfigDict) -> LayerConfig:
    """The sizes of the decoder layer with this prefix.

    What shapes do not show comes from the config (transformers' or speculators'), then from Vicuna.
    """
    q, k, v = (f"{prefix}self_attn.{name}_proj.weight" for name in "qkv")
    query_size, key_size = (extent(shapes, names, 0, VICUNA_HEAD_DIM) for names in ((q, k), (k, v, q)))
    head_dim = _read_head_dim(shapes, prefix, config, query_size, key_size)
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"its config has hidden_act: {activation!r}; only silu is supported")
    theta = number(config, "rope_theta") or number(section(config, "rope_parameters"), "rope_theta")
    return LayerConfig(
        num_attention_heads=query_size // head_dim,
        num_key_value_heads=key_size // head_dim,
        head_dim=head_dim,
        intermediate_size=extent(shapes, [f"{prefix}mlp.gate_proj.weight"], 0),
        rope_theta=theta or LayerConfig.rope_theta,
        rms_norm_eps=number(config, "rms_norm_eps") or LayerConfig.rms_norm_eps,
        input_norm=f"{prefix}input_layernorm.weight" in shapes,
        qkv_bias=any(f"{prefix}self_attn.{name}_proj.bias" in shapes for name in "qkv"),
        qk_norm=any(f"{prefix}self_attn.{name}_norm.weight" in shapes for name in "qk"),
        rope_scaling=_read_scaling(config),
    )


def read_windows(config: ConfigDict) -> tuple[int | None, tuple[int, ...]]:
    """The window of the layers, by a config of z-lab, speculators or SpecForge, and which of them have none.

    `use_swa` (of MiMo) is a window in all layers, if no type of layer tells otherwise.
    """
    kinds = config.get("layer_types") or ()
    if unknown := {*kinds} - {FULL, WINDOWED}:
        raise ValueError(f"its layers have {', '.join(sorted(unknown))}; only full attention and windows are supported")
    if WINDOWED not in kinds and not config.get("use_swa"):
        return None, ()
    window = number(config, "swa_window_size") or number(config, "sliding_window")
    if window is None:
        raise ValueError("its config has windows, but no size; add sliding_window")
    if config.get("use_sliding_window") is False:
        raise ValueError("its config has windows, and use_sliding_window: false; remove one of them")
    full_layers = tuple(index for index, kind in enumerate(kinds) if kind == FULL)
    return int(window), full_layers if WINDOWED in kinds else ()


def read_layer_list(key: str, listed: Any, from_output: int, layers: int | None) -> tuple[int, ...]:
    """The hidden states that a head reads, in transformers' numbering, from the list at this key of its config.

    from_output: 1 if the list numbers the layers that output them, from 0, and 0 if it numbers hidden states. layers:
    the target's, if known. Raises ValueError unless these are ascending numbers of the target's layers.
    """
    if not isinstance(listed, list) or not all(type(each) is int for each in listed):
        raise ValueError(f"its config has {key}: {listed!r}; it must be a list of layers")
    states = tuple(each + from_output for each in listed)
    if not states or [*states] != sorted({*states}) or states[0] < 0 or (layers is not None and states[-1] > layers):
        to = "" if layers is None else f" to {layers - from_output}, because the target has {layers} layers"
        right = "be ascending layer numbers" if states else "list at least one layer, in ascending order,"
        raise ValueError(f"its config has {key}: {listed}; it must {right} from {-from_output}{to}")
    return states


def check_width(key: str, states: Sequence[int], from_output: int, width: int, size: int) -> None:
    """Raise ValueError unless the features of these hidden states, each of this size, have the width that fc reads."""
    if len(states) * size != width:
        listed = [state - from_output for state in states]
        right = f"; a list of {width // size} would be right" if width % size == 0 else ""
        read = f"it reads {len(states)} layers of {size}: {key} is {listed}{right}"
        raise ValueError(f"wrong: fc.weight has {width} columns, but {read}")


def _read_head_dim(shapes: Shapes, prefix: str, config: ConfigDict, query_size: int, key_size: int) -> int:
    """The config's head_dim comes last: EAGLE's own code ignores it and trains with hidden_size / heads."""
    norms = [f"{prefix}self_attn.{name}_norm.weight" for name in "qk"]
    heads = number(config, "num_attention_heads")
    divided = query_size // heads if heads and query_size % heads == 0 and key_size % (query_size // heads) == 0 else 0
    head_dim = extent(shapes, norms, 0, 0) or divided or number(config, "head_dim") or VICUNA_HEAD_DIM
    if query_size % head_dim or key_size % head_dim:
        raise ValueError(
            f"the attention matrices have {query_size} and {key_size} rows, which are not multiples of head_dim "
            f"{head_dim}; add the right head_dim to its config"
        )
    return int(head_dim)


def _read_scaling(config: ConfigDict) -> Scaling | None:
    """The scaling in `rope_scaling` (the older form) or `rope_parameters` (transformers 5)."""
    scaling = section(config, "rope_scaling") or section(config, "rope_parameters")
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    known = ["factor", *NEEDED["llama3"], *OPTIONAL]
    unknown = [value for key, value in scaling.items() if value is not None and key not in {*known, *OTHER_ROPE_KEYS}]
    if rope_type == "default":  # its parameters do not matter, but one set for each layer type does
        unknown = [value for value in unknown if isinstance(value, Mapping)]
    if unknown or scaling.get("partial_rotary_factor", 1) != 1 or not scaling.get("truncate", True):
        raise ValueError(f"its config has rotary positions {dict(scaling)}; supported are rope_theta and {known}")
    if rope_type == "default":
        return None
    context = number(config, "max_position_embeddings")
    original = {"original_max_position_embeddings": context} if context and NEEDED.get(rope_type) else {}
    given = {key: value for key in known if (value := number(scaling, key)) is not None}
    return {"rope_type": rope_type, **original, **given}


def describe_proposal(kind: str, tokens: int, target: str | None) -> dict[str, Any]:
    """What a config of speculators says of how a head of a kind drafts, and for which target."""
    proposal = {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
        "verifier": {"name_or_path": target, "architectures": []},
    }
    return {"speculators_model_type": kind, "speculators_version": "0.9.0", "speculators_config": proposal}


def export_layer(config: EagleConfig | Eagle3Config | DFlashConfig) -> dict[str, Any]:
    """What the configs of EAGLE and block heads have in common, for transformers 4 and 5."""
    layer, layers = config.layer, getattr(config, "layers", 1)
    # In all layers. Without the last entry, transformers' config of Qwen3 drops it.
    window = {"layer_types": [WINDOWED] * layers, "sliding_window": layer.window, "use_sliding_window": True}
    sizes = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": layers,
        **{name: getattr(layer, name) for name in (*sizes, "rms_norm_eps", "rope_theta")},
        "hidden_act": "silu",
        "attention_bias": layer.qkv_bias,
        "mlp_bias": False,
        "rope_scaling": layer.rope_scaling,
        "rope_parameters": {"rope_type": "default", **(layer.rope_scaling or {}), "rope_theta": layer.rope_theta},
        "max_position_embeddings": config.max_position_embeddings or LONGEST,
        "tie_word_embeddings": False,
        **({} if layer.window is None else window),
    }
