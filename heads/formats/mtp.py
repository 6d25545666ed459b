"""The MTP module of a checkpoint, in the layouts of DeepSeek-V3 and GLM-4.5, of Qwen3-Next and 3.5, and of MiMo.

transformers drops these tensors when it loads the model. Of several modules the first is read. A module can have
embeddings and an output matrix: copies of the target's, which are compared with these where they are in the file too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

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
OUTSIDE = re.compile(r"(?:model\.|language_model\.)*(embed_tokens|lm_head)\.weight")  # the target's own matrices
QUANTIZED = ("_scale", "_scale_inv", "_packed", "qweight", "qzeros")  # ends of names
SAME_LAYERS = {"mimo": "qwen2"}  # models that transformers does not have, with the layers of one that it has


def is_mtp(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these names of tensors has an MTP module."""
    return bool(_list_modules(names))


@dataclass(frozen=True)
class Names:
    """The names that a file has for the tensors of its first module."""

    parts: Mapping[str, str]  # by our names
    matrices: Mapping[str, str]  # of its own, by our names
    inside: Mapping[str, str]  # of its layer, by their names in the layer

    @property
    def normed_feedback(self) -> bool:
        """As in `MtpConfig`, as `states_first`: the families differ in it."""
        return not self.parts["norm.weight"].endswith("shared_head.norm.weight")

    @property
    def states_first(self) -> bool:
        return self.parts["eh_proj.weight"].endswith("input_proj.weight")


def read_mtp(tensors: Mapping[str, Tensor], config: ConfigDict, sizes: TargetSizes) -> Layout:
    """The layout of a checkpoint's MTP module, with its tensors by our names.

    Raises ValueError if tensors are missing or unknown, or if transformers has no such model.
    """
    target = read_text_config(config)
    names = _find_names(tensors, target.num_hidden_layers)
    parts = {ours: tensors[full] for ours, full in names.parts.items()}
    for ours, full in names.matrices.items():
        matrix = _take_matrix(ours, full, tensors, (target.vocab_size, target.hidden_size))
        parts |= {} if matrix is None else {f"{ours}.weight": matrix}
    _refuse_quantized(tensors, names.inside.values())
    head_config = MtpConfig(
        target.hidden_size,
        target.vocab_size,
        target_layers=target.num_hidden_layers,
        block=describe_block(target, sparse=any("experts." in name for name in names.inside)),
        normed_feedback=names.normed_feedback,
        states_first=names.states_first,
        embedding="embed_tokens.weight" in parts,
        output="shared" if "lm_head.weight" in parts else "target",
    )
    return Layout(head_config, tensors={**_convert(head_config.block, tensors, names.inside), **parts})


def write_mtp(
    head: Any, module: Mapping[str, Tensor], config: ConfigDict, others: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of a checkpoint's first module with a head's values, by their names and in their dtypes and shapes.

    module: the tensors of all modules in the checkpoint. config: the checkpoint's. others: the target's own tensors,
    because a module can have copies of them. Raises ValueError if the head does not have the module's form.
    """
    names, states = _find_names(module, read_text_config(config).num_hidden_layers), head.state_dict()
    if (head.config.normed_feedback, head.config.states_first) != (names.normed_feedback, names.states_first):
        raise ValueError("the head has the form of another family's module; train from the checkpoint's own")
    values = {full: states[ours] for ours, full in names.parts.items()}
    for ours in MATRICES:
        own, taken = states.get(f"{ours}.weight"), names.matrices.get(ours)
        if own is not None and taken is None:
            raise ValueError(f"the head has its own {ours}, and the module has none; train from the checkpoint's own")
        own = _find_outside(ours, others) if own is None else own
        if taken is not None and own is not None:
            values[taken] = own[: head.vocab_size]
    values |= _revert(head.config.block, states, names.inside)
    written = {}
    for full, value in values.items():
        written[full] = module[full].clone()  # a matrix can have more rows, for tokens that the target does not have
        if (place := written[full][: len(value)]).shape != value.shape:
            raise ValueError(f"the head's {full} is {list(value.shape)}, the MTP module's {list(module[full].shape)}")
        place.copy_(value)
    return written


def select_modules(names: Iterable[str]) -> set[str]:
    """Those of a checkpoint's tensors that are of its MTP modules, of the first and of others."""
    names = [*names]
    begins = tuple(re.sub(r"(mtp(?:_layers)?\.).*", r"\1", prefix) for prefix in _list_modules(names))
    return {name for name in names if name.startswith(begins)}


def _find_names(tensors: Mapping[str, Tensor], layers: int) -> Names:
    """The names of the first module's tensors. layers: the target's. Raises ValueError if parts are missing."""
    prefix = _choose_first(_list_modules(tensors), layers)
    names = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
    parts = dict[str, str]()
    for ours, published in PARTS.items():
        found = next((f"{name}.weight" for name in published if f"{name}.weight" in names), None)
        if found is None:
            raise ValueError(f"missing: {prefix}{' or '.join(published)}.weight, of its MTP module")
        parts[f"{ours}.weight"] = names.pop(found)
    given = ((ours, f"{name}.weight") for ours, (own, _) in MATRICES.items() for name in own)
    matrices = {ours: names.pop(name) for ours, name in given if name in names}
    inside = {}
    for name, full in names.items():
        if not re.match(r"layers\.[1-9]", name):
            inside[name.removeprefix("layers.0.")] = full
    if not inside:
        layer = prefix if re.search(r"\d", prefix) else f"{prefix}layers.0."
        raise ValueError(f"missing: all tensors of the layer of its MTP module, whose names begin with {layer[:-1]}")
    return Names(parts, matrices, inside)


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


def _take_matrix(ours: str, full: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor | None:
    """A module's own embeddings or output matrix; None if it is a copy of the target's.

    Raises ValueError if it is quantized or of another shape.
    """
    _refuse_quantized(tensors, [full])
    matrix, other = tensors[full], _find_outside(ours, tensors)
    if matrix.ndim != 2 or matrix.shape[0] < shape[0] or matrix.shape[1] != shape[1]:
        raise ValueError(f"wrong in its MTP module: {full} is {list(matrix.shape)}, not {list(shape)}")
    matrix = matrix[: shape[0]]  # others are rows for tokens that the target does not have
    return None if other is not None and is_copy(matrix, other[: shape[0]]) else matrix


def _find_outside(ours: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The target's own matrix, if the file has it."""
    found = {match[1]: tensors[full] for full in tensors if (match := OUTSIDE.fullmatch(full))}
    return next((found[name] for name in MATRICES[ours][1] if name in found), None)


def _refuse_quantized(tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    if quantized := [full for full in names if full.endswith(QUANTIZED) or tensors[full].dtype.itemsize < 2]:
        raise ValueError(f"its MTP module is quantized ({quantized[0]}), which is not supported")


def read_text_config(config: ConfigDict) -> PreTrainedConfig:
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
    empty, layer = _make_empty(block)
    dtype = next(tensors[full].dtype for full in inside.values())
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


def _revert(block: Mapping[str, Any], states: Mapping[str, Tensor], inside: Mapping[str, str]) -> dict[str, Tensor]:
    """The inverse of `_convert`: a layer's tensors by their names in the file, from a head's.

    Files have either form of what is converted: an expert's matrices apart, or those of all experts in one. Raises
    ValueError if the file's names are neither.
    """
    empty, layer = _make_empty(block)
    own = {name.replace("block.layers.0.", layer): state for name, state in states.items() if name.startswith("block.")}
    reverted: dict[str, Tensor] = revert_weight_conversion(empty, own)
    for found in (own, reverted):
        if {*found} == {f"{layer}{name}" for name in inside}:
            return {full: found[f"{layer}{name}"] for name, full in inside.items()}
    different = {name.removeprefix(layer) for name in reverted} ^ {*inside}
    raise ValueError(f"the head and the MTP module have different layers: {list_names(sorted(different))}")


def _make_empty(block: Mapping[str, Any]) -> tuple[Any, str]:
    """A model of one layer without memory, and what the names of the layer's tensors in it begin with."""
    with torch.device("meta"):
        empty: Any = make_block(block)
    decoder = next(name for name, module in empty.named_modules() if module is empty.get_decoder())
    return empty, f"{decoder}.layers.0."


MTP = Format(is_mtp, read_mtp)
