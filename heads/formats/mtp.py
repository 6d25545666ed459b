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

from heads.formats.layout import ConfigDict, Layout, list_names
from heads.mtp import ATTENTION, MtpConfig, describe_block, make_block

PARTS = {  # our name -> the published ones
    "enorm": ("enorm", "pre_fc_norm_embedding", "token_layernorm"),
    "hnorm": ("hnorm", "pre_fc_norm_hidden", "hidden_layernorm"),
    "eh_proj": ("eh_proj", "fc", "input_proj"),
    "norm": ("shared_head.norm", "norm", "final_layernorm"),
}
# What the names of the first module's tensors begin with. Modules that are numbered as the layers after the last one
# have a norm of the token's embedding, which no other layer has.
MODULES = re.compile(
    r"((?:model\.)?(?:language_model\.)?(?:mtp\.|mtp\.layers\.0\.|mtp_layers\.0\.))"
    rf"(?:{'|'.join(PARTS['eh_proj'])})\.weight"
)
NUMBERED = re.compile(r"((?:model\.)?(?:language_model\.)?layers\.(\d+)\.)enorm\.weight")
COPIES = "shared_head.head.", "embed_tokens."  # of the target's matrices
QUANTIZED = ("_scale", "_scale_inv", "_packed", "qweight", "qzeros")  # ends of names
SAME_LAYERS = {"mimo": "qwen2"}  # models that transformers does not have, with the layers of one that it has


def read_mtp(tensors: Mapping[str, Tensor], config: ConfigDict) -> tuple[Layout, dict[str, Tensor]] | None:
    """The layout of a checkpoint's MTP module and its tensors by our names; None if it has no such tensors.

    Raises ValueError if tensors are missing or unknown, or if transformers has no such model.
    """
    prefix = _find_prefix(tensors)
    if prefix is None:
        return None
    target = _read_config(config)
    names = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
    parts, found = dict[str, Tensor](), dict[str, str]()
    for ours, published in PARTS.items():
        found[ours] = next((name for name in published if f"{name}.weight" in names), "")
        if not found[ours]:
            raise ValueError(f"missing: {prefix}{' or '.join(published)}.weight, of its MTP module")
        parts[f"{ours}.weight"] = tensors[names.pop(f"{found[ours]}.weight")]
    inside = {}  # the tensors of its layer, by their names in it, and in the file
    for name, full in names.items():
        if not name.startswith(COPIES) and not re.match(r"layers\.[1-9]", name):
            inside[name.removeprefix("layers.0.")] = full
    if quantized := [full for full in inside.values() if full.endswith(QUANTIZED) or tensors[full].dtype.itemsize < 2]:
        raise ValueError(f"its MTP module is quantized ({quantized[0]}), which is not supported")
    head_config = MtpConfig(
        target.hidden_size,
        target.vocab_size,
        target_layers=target.num_hidden_layers,
        block=describe_block(target, sparse=any("experts." in name for name in inside)),
        normed_feedback=found["norm"] != "shared_head.norm",
        states_first=found["eh_proj"] == "input_proj",
    )
    return Layout(head_config), {**_convert(head_config.block, tensors, inside), **parts}


def _find_prefix(names: Mapping[str, Any]) -> str | None:
    """What the names of the first module's tensors begin with."""
    prefix = next((match[1] for match in map(MODULES.fullmatch, names) if match), None)
    numbered = sorted((int(match[2]), match[1]) for match in map(NUMBERED.fullmatch, names) if match)
    return numbered[0][1] if prefix is None and numbered else prefix


def _read_config(config: ConfigDict) -> PreTrainedConfig:
    """The text config of the target. Raises ValueError if transformers does not know it."""
    kind = SAME_LAYERS.get(config.get("model_type", ""), config.get("model_type"))
    try:
        found: Any = AutoConfig.for_model(**{**config, "model_type": kind})
    except Exception as error:  # each config class has checks of its own
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"its MTP module needs transformers' model {kind!r}, which it cannot make ({reason})"
        ) from error
    return found.get_text_config(decoder=True)


def _convert(block: Mapping[str, Any], tensors: Mapping[str, Tensor], inside: Mapping[str, str]) -> dict[str, Tensor]:
    """A decoder layer's tensors by our names, as loading a model of this one layer makes them of published ones:
    experts are merged, for example.

    inside: the names of the layer's tensors, in the layer and in the file. Raises ValueError if some are missing,
    unknown or of another shape.
    """
    with torch.device("meta"):
        empty: Any = make_block(block)
    prefix = next(name for name, module in empty.named_modules() if module is empty.get_decoder()) + "."
    layer, dtype = f"{prefix}layers.0.", next(tensors[full].dtype for full in inside.values())
    given = {f"{layer}{name}": tensors[full] for name, full in inside.items()}
    for name, value in empty.state_dict().items():
        if not name.startswith(layer):
            given[name] = torch.zeros(value.shape, dtype=dtype)
    settings: dict[str, Any] = {"attn_implementation": ATTENTION, "experts_implementation": "eager", "dtype": dtype}
    settings |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        loaded, info = type(empty).from_pretrained(None, config=empty.config, state_dict=given, **settings)
    except RuntimeError as error:  # where tensors are converted
        raise ValueError(f"its MTP module cannot be converted: {str(error).partition(chr(10))[0]}") from error
    for fault, words in (("missing_keys", "missing"), ("unexpected_keys", "unexpected"), ("mismatched_keys", "wrong")):
        named = [each if isinstance(each, str) else each[0] for each in info[fault]]
        named = sorted(inside.get(name.removeprefix(layer), name.removeprefix(layer)) for name in named)
        if named:
            raise ValueError(f"{words} in its MTP module: {list_names(named)}")
    states = loaded.get_decoder().state_dict()
    return {f"block.{name}": tensor for name, tensor in states.items() if name.startswith("layers.")}
