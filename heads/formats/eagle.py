"""EAGLE heads as published, and as servers load them.

An EAGLE-1 folder (of EAGLE-2 and HASS too) has embeddings, mostly a copy of the target's, and a copy of its config with
a few changes. Its `num_hidden_layers` and `num_key_value_heads` are often wrong, and a missing `bias` means true.
EAGLE-3 heads are published by the authors, SpecForge, ModelOpt and speculators. Their first layer is named `midlayer`
or `layers.0`; speculators' config keeps its sizes in a nested object.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from heads.eagle import Eagle3Config, Eagle3Head, EagleConfig, EagleHead, PEagleConfig, PEagleHead, choose_features
from heads.formats.decoder_layer import (
    LAYER,
    NESTED,
    check_width,
    describe_proposal,
    export_layer,
    read_layer,
    read_layer_list,
    read_windows,
)
from heads.formats.layout import (
    EMBEDDING,
    MAP,
    MIDLAYER,
    OWN,
    ConfigDict,
    Format,
    Layout,
    Shapes,
    TargetSizes,
    count,
    export_token_map,
    extent,
    find_first_layer,
    find_shapes,
    number,
    read_common,
    rename,
    replace_prefix,
    section,
)

OUTPUT = "lm_head.weight"
READ = "eagle_aux_hidden_state_layer_ids"
MASK_TOKENS = "mask_token_id", "pard_token", "ptd_token_id"  # of P-EAGLE, in speculators' and in flat configs for vLLM
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm")  # flags with the same meaning in our config
KNOWN = {*NORMS, "norm_output", "embed_requires_grad", "tie_word_embeddings", "return_dict", "use_cache"}  # may be true


def is_eagle(names: Collection[str]) -> bool:
    """Whether a file with these names of tensors has an EAGLE-1 head, if it has no EAGLE-3 head."""
    return "fc.weight" in names and any(name.startswith(f"{LAYER}self_attn.") for name in names)


def read_eagle(tensors: Mapping[str, Tensor], config: ConfigDict, target: TargetSizes) -> Layout:
    """The layout of an EAGLE-1 head."""
    refuse_unknown(config)
    shapes = find_shapes(tensors)
    bias = "fc.bias" in shapes or bool(config.get("bias", True))
    if bias and "fc.bias" not in shapes:
        raise ValueError("missing: fc.bias, which is required unless its config has bias: false")
    head_config = EagleConfig(
        **read_common(shapes, extent(shapes, ["fc.weight"], 0), [OUTPUT], config, target.vocab_size),
        layer=read_layer(shapes, LAYER, config),
        bias=bias,
        embedding=EMBEDDING in shapes,
        output="shared" if OUTPUT in shapes else "target",
    )
    return Layout(head_config)


def export_eagle(head: EagleHead) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a folder for vLLM and SGLang; neither accepts an output matrix.

    SGLang finds its class by the first architecture, vLLM by "Eagle" + the second. SGLang needs a bias and gets zeros.
    vLLM would ignore a bias silently, so a head that has one does not name vLLM's class. The token map is in our
    section of the config, which servers do not read.
    """
    states, config = head.state_dict(), head.config
    tokens = {MAP: states.pop(MAP).tolist()} if MAP in states else {}
    states.setdefault("fc.bias", torch.zeros(config.hidden_size, dtype=head.fc.weight.dtype))
    return states, export_layer(config) | {
        "architectures": ["LlamaForCausalLMEagle", *([] if config.bias else ["LlamaForCausalLM"])],
        "attention_bias": False,  # true would mean a bias of o_proj too
        "qkv_bias": config.layer.qkv_bias,
        OWN: tokens,
    }


def is_eagle3(names: Collection[str]) -> bool:
    """Whether a file with these names of tensors has an EAGLE-3 head, or a P-EAGLE head."""
    prefix = find_first_layer(names)
    fuses = prefix == MIDLAYER or f"{prefix}hidden_norm.weight" in names
    return fuses and any(name.startswith(f"{prefix}self_attn.") for name in names)


def is_peagle(names: Collection[str]) -> bool:
    """Whether a file with these names of tensors has a P-EAGLE head: an EAGLE-3 head that drafts in one pass."""
    return "mask_hidden" in names and is_eagle3(names)


def read_eagle3(tensors: Mapping[str, Tensor], config: ConfigDict, target: TargetSizes) -> Layout:
    """The layout of an EAGLE-3 or P-EAGLE head."""
    refuse_unknown(config)
    shapes = find_shapes(tensors)
    prefix = find_first_layer(shapes)
    renamed, layer_config = {MIDLAYER: prefix}, {**config, **section(config, NESTED)}
    norms = _read_norms(shapes, config, prefix)
    shapes = rename(shapes, renamed)
    query_width = extent(shapes, [f"{MIDLAYER}self_attn.q_proj.weight"], 1, 2)
    hidden_size = extent(shapes, [f"{MIDLAYER}self_attn.o_proj.weight"], 0, query_width // 2)
    key, features, from_output = _read_features(config, target.layers)
    width = extent(shapes, ["fc.weight"], 1, len(features))
    target_size = number(layer_config, "target_hidden_size")
    if not target_size and (EMBEDDING not in shapes or width % len(features)):
        target_size = hidden_size
    target_size = int(target_size or width // len(features))
    check_width(key, features, from_output, width, target_size)
    depth = max((1, *count("layers.{}.self_attn.o_proj.weight", shapes)))
    window, full_layers = read_windows(layer_config) if NESTED in config else (None, ())  # flat ones copy the target's
    if full_layers:
        raise ValueError("some of its layers attend to a window and others to everything; EAGLE heads have one kind")
    settings: dict[str, Any] = {
        **read_common(shapes, hidden_size, [OUTPUT], layer_config, target.vocab_size),
        "layer": replace(read_layer(shapes, MIDLAYER, layer_config), window=window),
        "features": features,
        "layers": depth,
        "output": "shared" if OUTPUT in shapes else "target",
        "target_hidden_size": None if target_size == hidden_size else target_size,
        "embedding": EMBEDDING in shapes,
        "bias": "fc.bias" in shapes,
        **norms,
    }
    if is_peagle(shapes):
        head_config: Eagle3Config = PEagleConfig(**settings, **_read_block(config))
    else:
        head_config = Eagle3Config(**settings)
    unused = [f"layers.{number}.hidden_norm.weight" for number in range(1, depth)]  # vLLM has them in all layers
    ignored = {"t2d", *unused, *([] if head_config.final_norm else ["norm.weight"])}
    return Layout(head_config, renamed, ignored)


def _read_block(config: ConfigDict) -> dict[str, Any]:
    """What a P-EAGLE head has in addition: its mask token, and how many tokens it was trained to draft."""
    key = next((name for name in MASK_TOKENS if config.get(name) is not None), MASK_TOKENS[0])
    token = config.get(key)
    if type(token) is not int:
        raise ValueError(f"its config has {key}: {token!r}; it must be a token")
    proposals = section(config, "speculators_config").get("proposal_methods") or [{}]
    tokens = number(proposals[0], "speculative_tokens")
    return {"mask_token": token, **({"heads": tokens} if tokens else {})}


def refuse_unknown(config: ConfigDict) -> None:
    """Raise ValueError for speculators' heads of other kinds, and for settings that may change the drafts."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3", "peagle"):
        raise ValueError(f"it is speculators' {kind} head; only their eagle3, peagle, dflash and dspark are supported")
    if unknown := [name for name, value in config.items() if NESTED in config and value is True and name not in KNOWN]:
        raise ValueError(f"its config has {unknown[0]}: true, which is unknown; known are {sorted(KNOWN)}")


def _read_features(config: ConfigDict, layers: int | None) -> tuple[str, tuple[int, ...], int]:
    """The key of the layers to read, the hidden states in transformers' numbering, and the difference between the two
    numberings, 0 or 1.

    In transformers' numbering, L is the output of the first L layers.

    vLLM and speculators use this numbering, at the top of the config. SGLang and SpecForge list them inside
    `eagle_config`, by the index of the layer that outputs them, from 0: one less. As for vLLM, an empty list is none.
    """
    outer, nested = config.get(READ), section(config, "eagle_config").get(READ)
    if not outer and not nested:
        if layers is None:
            raise ValueError(f"it does not list the layers it reads; pass layers=, or add {READ} to its config")
        return f"the default of {READ}", choose_features(layers), 0
    key, listed, from_output = (READ, outer, 0) if outer else (f"eagle_config.{READ}", nested, 1)
    return key, read_layer_list(key, listed, from_output, layers), from_output


def norms_residual(config: ConfigDict) -> bool:
    """What a config without `norm_before_residual` means: true in speculators' format, but for P-EAGLE."""
    return NESTED in config and config.get("speculators_model_type") != "peagle"


def _read_norms(shapes: Shapes, config: ConfigDict, prefix: str) -> dict[str, Any]:
    """The norms. A norm in the file is used, whatever the config has.

    `norm_output` in speculators, vLLM, SGLang and EAGLE-3.1 (`fc_norm`): normed states are fed back. Elsewhere in
    SpecForge, whose configs are flat and whose layer is `midlayer`: the output matrix reads normed states.
    """
    nested, norm_output = NESTED in config, config.get("norm_output")
    fc_norm = bool(config.get("fc_norm")) or any(name.startswith("fc_norm.") for name in shapes)
    is_feedback = nested or fc_norm or prefix == LAYER
    return {
        "fc_norm": fc_norm,
        "norm_before_fc": bool(config.get("norm_before_fc")) or "input_norm.weight" in shapes,
        "norm_before_residual": bool(config.get("norm_before_residual", norms_residual(config))),
        "normed_feedback": is_feedback and bool(norm_output),
        "final_norm": is_feedback or norm_output is not False,
    }


def export_eagle3(head: Eagle3Head) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a folder for vLLM and SGLang, with the layers to read in both numberings.

    SGLang has one layer, and ignores `norm_before_residual`, the head's own embeddings and all biases. Neither server
    can omit the last norm. Only vLLM has norms of queries and keys, in its Qwen3 class. Heads of the default config
    need none of these.
    """
    states, config, qwen3 = head.state_dict(), head.config, head.config.layer.qk_norm
    if config.layers > 1 or head.kind == "peagle":  # SGLang's class, of one layer, has `midlayer`
        states = {replace_prefix(name, {MIDLAYER: LAYER}): state for name, state in states.items()}
    export_token_map(states, config.vocab_size)
    return states, export_layer(config) | {
        "architectures": ["Eagle3Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if qwen3 else "llama",
        "target_hidden_size": head.target_hidden_size,
        "draft_vocab_size": None if config.output == "target" else head.draft_size,
        **{name: getattr(config, name) for name in NORMS},
        # Without the key, states are normed and not fed back so. False means another thing to SpecForge: `_read_norms`.
        **({} if config.final_norm and not config.normed_feedback else {"norm_output": config.normed_feedback}),
        READ: list(config.features),
        "num_aux_hidden_states": len(config.features),
        "eagle_config": {READ: [layer - 1 for layer in config.features], "use_aux_hidden_state": True},
    }


def export_peagle(head: PEagleHead) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a folder of speculators, from which vLLM makes a class that drafts in one pass."""
    states, flat = export_eagle3(head)
    sizes = {name: flat.pop(name) for name in export_layer(head.config)}
    proposal = describe_proposal("peagle", head.config.heads, head.config.target_name)
    return states, flat | proposal | {
        "architectures": ["PEagleSpeculator"],
        NESTED: sizes,
        "mask_token_id": head.config.mask_token,
    }


EAGLE = Format(is_eagle, read_eagle, export_eagle, frozenset({"fc.bias"}))
EAGLE3 = Format(is_eagle3, read_eagle3, export_eagle3, frozenset({"t2d"}))
PEAGLE = Format(is_peagle, read_eagle3, export_peagle, frozenset({"t2d"}))
