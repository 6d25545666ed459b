"""Block heads as z-lab, speculators, SpecForge and DeepSpec publish them, and as servers load them.

z-lab's config (SpecForge's too) is flat: a Qwen3 config with an object `dflash_config`; layers are numbered from 0 by
the one that outputs them. speculators nests the layers' config and numbers hidden states as transformers does. DSpark
is DFlash with a Markov head, our pair score; DFlash2 has a selector in its place, and convolutions. Published ones have
an output matrix only where a part of the vocabulary is drafted, and embeddings only as copies of the target's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from heads.dflash import DFlashConfig, DFlashHead
from heads.formats.decoder_layer import (
    FULL,
    LAYER,
    NESTED,
    READ_FROM_0,
    WINDOWED,
    check_width,
    describe_proposal,
    export_layer,
    read_layer,
    read_layer_list,
    read_windows,
)
from heads.formats.layout import (
    EMBEDDING,
    ConfigDict,
    Format,
    Layout,
    Shapes,
    TargetSizes,
    count,
    export_token_map,
    extent,
    find_shapes,
    number,
    read_common,
    section,
)

INNER = "dflash_config"  # z-lab's settings
PREDECESSORS = "markov_head.markov_w1.weight"
SELECTOR = "candidate_selector."
CODEBOOKS = f"{SELECTOR}predecessor_codebook", f"{SELECTOR}successor_codebook"  # modules of z-lab add .weight
DOMINO = "prefix_gru."
SCALES = {  # z-lab's names of our settings
    "embedding_scale": "input_embedding_scale",
    "logit_factor": "output_multiplier",
    "logit_cap": "final_logit_softcapping",  # 0: none
}
ARCHITECTURES = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator", "dflash2": "DFlash2DraftModel"}
READ = "aux_hidden_state_layer_ids"


def is_dflash(names: Collection[str]) -> bool:
    """Whether a file with these names of tensors has a block head."""
    return {"fc.weight", "hidden_norm.weight", f"{LAYER}self_attn.q_proj.weight"} <= {*names}


def read_dflash(tensors: Mapping[str, Tensor], config: ConfigDict, target: TargetSizes) -> Layout:
    """The layout of a block head."""
    shapes = find_shapes(tensors)
    if any(tensor.startswith(DOMINO) for tensor in shapes):
        raise ValueError("it is a Domino head; DFlash, DFlash2 and DSpark are supported")
    nested, inner = section(config, NESTED), section(config, INNER)
    layer_config, settings = {**config, **nested}, {**config, **inner}
    _refuse_unknown(settings)
    window, full_layers = read_windows({**layer_config, **inner})
    hidden_size = extent(shapes, ["hidden_norm.weight"], 0)
    is_speculators = READ in config
    listed = settings.get(READ if is_speculators else READ_FROM_0)
    if listed is None:
        raise ValueError(f"its config must list the layers that it reads, as {INNER}.{READ_FROM_0} or {READ}")
    key = READ if is_speculators else f"{INNER}.{READ_FROM_0}" if READ_FROM_0 in inner else READ_FROM_0
    target_layers = None
    if settings.get("num_target_layers") is not None:
        target_layers = _read_whole(settings, "num_target_layers")
    features = read_layer_list(key, listed, 1 - is_speculators, target_layers or target.layers)
    check_width(key, features, 1 - is_speculators, extent(shapes, ["fc.weight"], 1), hidden_size)
    layers = count("layers.{}.self_attn.q_proj.weight", shapes)[0]
    if (kinds := layer_config.get("layer_types")) and len(kinds) != layers:
        raise ValueError(f"its config's layer_types has {len(kinds)} entries; the head has {layers} layers")
    rank = extent(shapes, [PREDECESSORS], 1, 0)
    kind = settings.get("speculators_model_type", "dspark" if rank else "dflash")
    is_dflash2 = any(name.startswith(SELECTOR) for name in shapes)
    from_anchor, size = bool(settings.get("sample_from_anchor", kind == "dspark")), _read_whole(settings, "block_size")
    seeing = {"sliding_window_non_causal": kind == "dflash2", **nested, **settings}
    head_config = DFlashConfig(
        **read_common(shapes, hidden_size, ["lm_head.weight"], layer_config, target.vocab_size),
        layer=replace(read_layer(shapes, LAYER, layer_config), input_norm=True, window=window),
        features=features,
        target_layers=target_layers,
        embedding=EMBEDDING in shapes,
        mask_token=_read_whole(settings, "mask_token_id"),
        output="shared" if "lm_head.weight" in shapes else "target",
        heads=size if from_anchor else size - 1,
        layers=layers,
        from_anchor=from_anchor,
        causal=_read_causal(seeing, window, full_layers),
        full_layers=full_layers,
        **{ours: value for ours, name in SCALES.items() if (value := number({name: settings.get(name) or None}, name))},
        **(_read_dflash2(shapes, settings, hidden_size) if is_dflash2 else {"pair_rank": rank}),
    )
    ignored = {"t2d", *(name for name in shapes if name.startswith("confidence_head."))}
    renamed = {name: f"{name}.weight" for name in CODEBOOKS if f"{name}.weight" in shapes}
    return Layout(head_config, renamed, ignored)


def _read_dflash2(shapes: Shapes, settings: ConfigDict, hidden_size: int) -> dict[str, Any]:
    """The sizes of DFlash2's selector and convolutions."""
    convolution = f"{LAYER}attention_conv."
    taps = extent(shapes, [f"{convolution}base_kernel"], 1)
    groups = extent(shapes, [f"{convolution}kernel_projection.weight"], 0, 2 * taps) // (2 * taps)
    return {
        "pair_rank": extent(shapes, [CODEBOOKS[0], f"{CODEBOOKS[0]}.weight"], 1),
        "candidates": _read_whole(settings, "selector_top_k"),
        "taps": taps,
        "group": hidden_size // max(1, groups),
    }


def _read_causal(settings: ConfigDict, window: int | None, full_layers: tuple[int, ...]) -> bool:
    """Whether rows of a block see no later ones. Those of windows do not, unless the config says so.

    `use_swa` (of MiMo) means windows whose rows do.
    """
    for name in ("is_causal", "causal"):
        if settings.get(name) is not None:
            if settings[name] and full_layers:
                raise ValueError(f"its config has {name}: true, which is not supported where some layers have a window")
            return bool(settings[name])
    return window is not None and not settings.get("sliding_window_non_causal") and not settings.get("use_swa")


def _refuse_unknown(settings: ConfigDict) -> None:
    """Raise ValueError for a scale or pair score that the head does not have."""
    if settings.get("logit_scale", 1) != 1:
        raise ValueError(f"its config has logit_scale: {settings['logit_scale']!r}; only 1 is supported")
    if (kind := settings.get("markov_head_type", "vanilla")) != "vanilla":
        raise ValueError(f"its markov_head_type is {kind!r}; only vanilla is supported")


def _read_whole(settings: ConfigDict, name: str) -> int:
    value = settings.get(name)
    if type(value) is not int or value < 0:
        raise ValueError(f"its config has {name}: {value!r}; it must be a whole number")
    return value


def export_dflash(head: DFlashHead) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a folder of speculators, which vLLM loads.

    Servers need the output matrix where a part of the vocabulary is drafted; a head that uses the target's rows gets a
    copy of them. They have norms of queries and keys. The format has no scales; z-lab's names of them are read here.
    """
    states, config = head.state_dict(), head.config
    kind = "dflash2" if config.candidates else "dspark" if head.has_pairs else "dflash"
    export_token_map(states, config.vocab_size)
    if head.token_map is not None and head.borrowed is not None:
        states["lm_head.weight"] = head.borrowed
    markov = {"markov_rank": config.pair_rank, "markov_head_type": "vanilla"}
    markov |= dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), False)
    selector = {"selector_rank": config.pair_rank, "selector_top_k": config.candidates}
    selector |= {"conv_kernel_size": config.taps, "conv_group_size": config.group}
    more: dict[str, dict[str, Any]] = {"dspark": markov, "dflash2": selector, "dflash": {}}
    sights = map(config.find_sight, range(config.layers))
    kinds = {"model_type": "qwen3", "layer_types": [FULL if window is None else WINDOWED for window, _ in sights]}
    # vLLM takes is_causal for all layers. Without it, only those with a window are causal in DSpark.
    causal = {} if config.causal and config.full_layers else {"is_causal": config.causal}
    return states, {
        "architectures": [ARCHITECTURES[kind]],
        **describe_proposal(kind, config.heads, config.target_name),
        NESTED: export_layer(config) | kinds | causal,
        "draft_vocab_size": head.draft_size,
        "block_size": head.rows,
        READ: [*config.features],
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.from_anchor,
        **({"sliding_window_non_causal": not config.causal} if config.causal or config.layer.window else {}),
        **find_scales(config),
    } | more[kind]


def find_scales(config: DFlashConfig) -> dict[str, float]:
    """The scales of embeddings and logits that a head has, by z-lab's names."""
    usual = {each.name: each.default for each in fields(config)}
    return {name: getattr(config, ours) for ours, name in SCALES.items() if getattr(config, ours) != usual[ours]}


DFLASH = Format(is_dflash, read_dflash, export_dflash, frozenset({"t2d", "lm_head.weight"}))
