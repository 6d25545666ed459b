"""The MTP module of a checkpoint, in the layouts of DeepSeek-V3 and GLM-4.5, of Qwen3-Next and 3.5, and of MiMo.

transformers drops these tensors when it loads the model. Of several modules the first is read. A module can have
embeddings and an output matrix: copies of the target's, which are compared with these where they are in the file too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from heads.formats.layout import ConfigDict, Format, Layout, TargetSizes, list_names
from heads.mtp import ATTENTION, MtpConfig, describe_block, make_block
from heads.vocabulary import is_copy

PARTS = {  # our name -> the published ones
    "enorm": ("enorm", "pre_fc_norm_embedding", "token_layernorm"),
    "hnorm": ("hnorm", "pre_fc_norm_hidden", "hidden_layernorm"),
    "eh_proj": ("eh_proj", "fc", "input_proj"),
    "norm": ("shared_head.norm", "norm", "final_layernorm"),
}
MATRICES = {  # our name -> the published ones, and those of the target's own
    "embed_tokens": (("embed_tokens",), ("embed_tokens",)),
    "lm_head": (("shared_head.head", "lm_head"), ("lm_head", "embed_tokens")),
}
# What the names of a module's tensors begin with. Modules that are numbered as the layers after the last one have a
# norm of the token's embedding, which no other layer has.
MODULES = re.compile(
    r"((?:model\.)?(?:language_model\.)?mtp(?:\.|\.layers\.(\d+)\.|_layers\.(\d+)\.))"
    rf"(?:{'|'.join(PARTS['eh_proj'])})\.weight"
)
NUMBERED = re.compile(r"((?:model\.)?(?:language_model\.)?layers\.(\d+)\.)enorm\.weight")
OUTSIDE = re.compile(r"(?:model\.|language_model\.)*(embed_tokens|lm_head)\.(.+)")  # the target's own matrices
QUANTIZED = ("_scale", "_scale_inv", "_packed", "qweight", "qzeros")  # ends of names
SAME_LAYERS = {"mimo": "qwen2"}  # models that transformers does not have, with the layers of one that it has


def is_mtp(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these names of tensors has an MTP module."""
    return bool(_list_modules(names))


def read_mtp(tensors: Mapping[str, Tensor], config: ConfigDict, sizes: TargetSizes) -> Layout:
    """The layout of a checkpoint's MTP module, with its tensors by our names.

    Raises ValueError if tensors are missing or unknown, or if transformers has no such model.
    """
    target = _read_config(config)
    prefix = _choose_first(_list_modules(tensors), target.num_hidden_layers)
    names = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
    parts, found = dict[str, Tensor](), dict[str, str]()
    for ours, published in PARTS.items():
        found[ours] = next((name for name in published if f"{name}.weight" in names), "")
        if not found[ours]:
            raise ValueError(f"missing: {prefix}{' or '.join(published)}.weight, of its MTP module")
        parts[f"{ours}.weight"] = tensors[names.pop(f"{found[ours]}.weight")]
    for ours in MATRICES:
        matrix = _take_matrix(ours, tensors, names, (target.vocab_size, target.hidden_size))
        parts |= {} if matrix is None else {f"{ours}.weight": matrix}
    inside = {}  # the tensors of its layer, by their names in it, and in the file
    for name, full in names.items():
        if not re.match(r"layers\.[1-9]", name):
            inside[name.removeprefix("layers.0.")] = full
    _refuse_quantized(tensors, inside.values())
    if not inside:
        layer = prefix if re.search(r"\d", prefix) else f"{prefix}layers.0."
        raise ValueError(f"missing: all tensors of the layer of its MTP module, whose names begin with {layer[:-1]}")
    head_config = MtpConfig(
        target.hidden_size,
        target.vocab_size,
        target_layers=target.num_hidden_layers,
        block=describe_block(target, sparse=any("experts." in name for name in inside)),
        normed_feedback=found["norm"] != "shared_head.norm",
        states_first=found["eh_proj"] == "input_proj",
        embedding="embed_tokens.weight" in parts,
        output="shared" if "lm_head.weight" in parts else "target",
    )
    return Layout(head_config, tensors={**_convert(head_config.block, tensors, inside), **parts})


def _list_modules(names: Iterable[str]) -> dict[str, int]:
    """The number of each module by what the names of its tensors begin with."""
    names = [*names]
    counted = {match[1]: int(match[2] or match[3] or 0) for match in map(MODULES.fullmatch, names) if match}
    return counted or {match[1]: int(match[2]) for match in map(NUMBERED.fullmatch, names) if match}


def _choose_first(modules: Mapping[str, int], layers: int) -> str:
    """The beginning of the first module's names. Raises ValueError if only later ones are there.

    Modules named as layers continue the target's layers; in a file without these they begin at 0.
    """
    numbers = sorted(modules, key=lambda prefix: modules[prefix])
    first = next((prefix for prefix in numbers if modules[prefix] == 0), None)
    if first is None and "mtp" not in numbers[0]:
        first = next((prefix for prefix in numbers if modules[prefix] == layers), None)
    if first is None:
        number = 0 if "mtp" in numbers[0] else layers
        wanted = re.sub(r"\d+", str(number), numbers[0])
        raise ValueError(
            f"its first MTP module, {wanted[:-1]}, is missing; it has {', '.join(prefix[:-1] for prefix in numbers)}"
        )
    return first


def _take_matrix(
    ours: str, tensors: Mapping[str, Tensor], names: dict[str, str], shape: tuple[int, int]
) -> Tensor | None:
    """A module's own embeddings or output matrix, whose tensors are taken out of `names`; None if it has the target's.

    Raises ValueError if they are quantized or of another shape.
    """
    published, theirs = MATRICES[ours]
    taken: dict[str, str] = {}  # by what follows the matrix's name: weight, or also the scales of a quantized one
    for name in published:
        taken |= {each.removeprefix(f"{name}."): names.pop(each) for each in [*names] if each.startswith(f"{name}.")}
    if not taken:
        return None
    outside = {(match[1], match[2]): full for full in tensors if (match := OUTSIDE.fullmatch(full))}
    given = next((name for name in theirs if (name, "weight") in outside), "")
    same = {rest: outside.get((given, rest)) for rest in taken}
    if all(other is not None and _is_equal(tensors[taken[rest]], tensors[other]) for rest, other in same.items()):
        return None
    _refuse_quantized(tensors, taken.values())
    if [*taken] != ["weight"]:
        unknown = [full for rest, full in taken.items() if rest != "weight"]
        raise ValueError(f"unexpected in its MTP module: {list_names(unknown)}")
    matrix = tensors[taken["weight"]]
    if matrix.ndim != 2 or matrix.shape[0] < shape[0] or matrix.shape[1] != shape[1]:
        raise ValueError(f"wrong in its MTP module: {taken['weight']} is {list(matrix.shape)}, not {list(shape)}")
    matrix = matrix[: shape[0]]  # others are rows for tokens that the target does not have
    other = same["weight"]
    return None if other is not None and is_copy(matrix, tensors[other][: shape[0]]) else matrix


def _is_equal(own: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bytes."""
    if (own.dtype, own.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(own.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _refuse_quantized(tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    if quantized := [full for full in names if full.endswith(QUANTIZED) or tensors[full].dtype.itemsize < 2]:
        raise ValueError(f"its MTP module is quantized ({quantized[0]}), which is not supported")


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


MTP = Format(is_mtp, read_mtp)
