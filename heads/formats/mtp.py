"""The MTP module of a checkpoint, in the layouts of DeepSeek-V3 and GLM-4.5, of Qwen3-Next and 3.5, and of MiMo.

transformers drops these tensors when it loads the model. Of several modules the first is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from heads.formats.layout import ConfigDict, Layout, list_names, section
from heads.mtp import ATTENTION, MtpConfig, describe_block, make_block

PARTS = {  # our name -> the published ones
    "enorm": ("enorm", "pre_fc_norm_embedding", "token_layernorm"),
    "hnorm": ("hnorm", "pre_fc_norm_hidden", "hidden_layernorm"),
    "eh_proj": ("eh_proj", "fc", "input_proj"),
    "norm": ("shared_head.norm", "norm", "final_layernorm"),
}
COPIES = "shared_head.head.", "embed_tokens."  # of the target's matrices
SAME_LAYERS = {"mimo": "qwen2"}  # models that transformers does not have, with the layers of one that it has


def read_mtp(tensors: Mapping[str, Tensor], config: ConfigDict) -> tuple[Layout, dict[str, Tensor]] | None:
    """The layout of a checkpoint's MTP module and its tensors by our names; None if it has no such tensors.

    Raises ValueError if tensors are missing or unknown, or if transformers has no such model.
    """
    layers = {**config, **section(config, "text_config")}.get("num_hidden_layers")
    prefix = _find_prefix(tensors, layers)
    if prefix is None:
        return None
    target = _read_config(config)
    names = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
    parts: dict[str, Tensor] = {}
    for ours, published in PARTS.items():
        found = next((name for name in published if f"{name}.weight" in names), None)
        if found is None:
            raise ValueError(f"missing: {prefix}{published[0]}.weight, of its MTP module")
        parts[ours] = tensors[names.pop(f"{found}.weight")]
        if ours == "eh_proj":
            projection = found
        if ours == "norm":
            feeds_normed = found != "shared_head.norm"
    inside = {re.sub(r"^layers\.0\.", "", name): tensors[full] for name, full in names.items()}
    inside = {name: tensor for name, tensor in inside.items() if not name.startswith(COPIES)}
    if scaled := [name for name in inside if "scale_inv" in name or "qweight" in name]:
        raise ValueError(f"its MTP module is quantized ({prefix}{scaled[0]}), which is not supported")
    block = describe_block(target, sparse=any("experts." in name for name in inside))
    states = _convert(block, inside, parts["norm"].dtype)
    head_config = MtpConfig(
        target.hidden_size,
        target.vocab_size,
        target_layers=layers,
        block=block,
        normed_feedback=feeds_normed,
        states_first=projection == "input_proj",
    )
    return Layout(head_config), {**states, **{f"{name}.weight": tensor for name, tensor in parts.items()}}


def _find_prefix(names: Mapping[str, Any], layers: int | None) -> str | None:
    """What the names of the first module's tensors begin with."""
    of_layer = rf"|(?:\w+\.)*layers\.{layers}\." if layers else ""
    form = re.compile(rf"((?:model\.)?mtp\.|model\.mtp\.layers\.0\.|model\.mtp_layers\.0\.{of_layer})")
    projections = "|".join(PARTS["eh_proj"])
    found = (re.fullmatch(rf"{form.pattern}(?:{projections})\.weight", name) for name in names)
    return next((match[1] for match in found if match), None)


def _read_config(config: ConfigDict) -> PreTrainedConfig:
    """The text config of the target. Raises ValueError if transformers does not know it."""
    settings = dict(config)
    kind = SAME_LAYERS.get(settings.get("model_type", ""), settings.get("model_type"))
    try:
        found: Any = AutoConfig.for_model(**{**settings, "model_type": kind})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"transformers has no model {kind!r}, whose decoder layer its MTP module needs") from error
    return found.get_text_config(decoder=True)


def _convert(block: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A decoder layer's tensors by transformers' names, as loading a model of this one layer makes them of published
    ones: experts are merged, for example. Raises ValueError if tensors are missing or unknown."""
    with torch.device("meta"):
        empty: Any = make_block(block)
    prefix = next(name for name, module in empty.named_modules() if module is empty.get_decoder()) + "."
    rest = {
        name: torch.zeros(value.shape, dtype=dtype)
        for name, value in empty.state_dict().items()
        if not name.startswith(f"{prefix}layers.")
    }
    given = {f"{prefix}layers.0.{name}": tensor for name, tensor in tensors.items()}
    settings = {"attn_implementation": ATTENTION, "experts_implementation": "eager"}
    loaded, info = type(empty).from_pretrained(
        None, config=empty.config, state_dict={**rest, **given}, dtype=dtype, output_loading_info=True, **settings
    )
    for fault, words in (("missing_keys", "missing"), ("unexpected_keys", "unexpected"), ("mismatched_keys", "wrong")):
        if named := sorted(map(str, info[fault])):
            raise ValueError(f"{words} in its MTP module: {list_names(named)}")
    states = loaded.get_decoder().state_dict()
    return {f"block.{name}": tensor for name, tensor in states.items() if name.startswith("layers.")}
