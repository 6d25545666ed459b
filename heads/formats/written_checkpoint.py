"""Copies of a model's checkpoint with an MTP module: the one that was trained here, or that of another checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.atomic_write import create_folder
from heads.formats.layout import ConfigDict, TargetSizes, list_names, section
from heads.formats.mtp import NUMBERED, read_mtp, read_text_config, select_modules, write_mtp
from heads.formats.weight_files import CONFIG, INDEX, WEIGHTS, find_weights, read_json, read_weight_file
from heads.mtp import MtpHead

SHARD = "model-mtp.safetensors"  # holds the modules and nothing else
ONLY = "model-00001-of-00001.safetensors"  # what a checkpoint's only file is called next to it
OTHER_WEIGHTS = ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"  # endings of files that are left out
TEMPLATES = "additional_chat_templates"  # a folder of the tokenizer
FIELDS = re.compile("mtp|nextn")  # in the names of a config's fields that tell of modules
SAME = "model_type", "hidden_size", "num_hidden_layers"  # if the module of one model can serve another


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder. files: the tensors of each weight file, memory-mapped, and its metadata."""

    folder: Path
    config: dict[str, Any]
    files: Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, str]]]

    @cached_property
    def modules(self) -> dict[str, Tensor]:
        """The tensors of its MTP modules by name; {} if it has none."""
        tensors = self._tensors
        return {name: tensors[name] for name in select_modules(tensors)}

    @cached_property
    def others(self) -> dict[str, Tensor]:
        """Its other tensors."""
        return {name: tensor for name, tensor in self._tensors.items() if name not in self.modules}

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {name: tensor for tensors, _ in self.files.values() for name, tensor in tensors.items()}


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder. Raises ValueError if there is none in safetensors files, or a quantized one."""
    try:
        paths, _ = find_weights(folder, (WEIGHTS, WEIGHTS + INDEX))
        if not (folder / CONFIG).is_file():
            raise ValueError(f"it holds no {CONFIG}")
        config = read_json(folder / CONFIG)
        if any(each.get("quantization_config") for each in (config, _find_text(config))):
            raise ValueError("it is quantized, which is not supported; take the one that is not")
        return Checkpoint(folder, config, {path.name: read_weight_file(path) for path in paths})
    except ValueError as error:
        raise ValueError(f"cannot use the checkpoint in {str(folder)!r}: {error}") from error


def write_checkpoint(model: Checkpoint, base: Checkpoint, folder: Path, head: MtpHead | None = None) -> None:
    """Write a copy of a model's checkpoint with the MTP modules of `base`, the first with a head's values.

    base can be the model itself. folder: missing or empty; after an error, a kill or on a full disk there is nothing
    there. Shards without a module are copied byte by byte. Raises ValueError as `compose_modules` does.
    """
    modules = compose_modules(model, base, head)
    create_folder(folder, partial(_write_folder, model, modules, _select_fields(base.config)))


def compose_modules(model: Checkpoint, base: Checkpoint, head: MtpHead | None = None) -> dict[str, Tensor]:
    """The tensors that `write_checkpoint` writes as modules, by name.

    Raises ValueError if `base` has no module, or if it does not fit the model or the head.
    """
    if not base.modules:
        raise ValueError(f"{base.folder} has no MTP module")
    try:
        _check_model(model, base)
        modules, others = base.modules, model.others
        if head is not None:
            modules = modules | write_mtp(head, modules, base.config, others)
        found = read_mtp(others | modules, model.config, TargetSizes(None, None)).tensors or {}
    except ValueError as error:
        raise ValueError(f"the MTP module of {base.folder} does not fit {model.folder}: {error}") from error
    for name, state in () if head is None else head.state_dict().items():  # conversions are transformers' own
        read = found.get(name, None if name.startswith("block.") else state)
        alike = read is not None and read.shape == state.shape
        if read is None or not alike or not torch.allclose(read, state.to(read), rtol=0.02, atol=1e-3):
            raise ValueError(f"{name} of the MTP module would be read as another tensor: its model is not supported")
    return modules


def _check_model(model: Checkpoint, base: Checkpoint) -> None:
    """Raise ValueError if a checkpoint is of another model, or if its modules' names do not fit in."""
    ours, theirs = read_text_config(model.config), read_text_config(base.config)
    for name in SAME:
        if (own := getattr(ours, name)) != (other := getattr(theirs, name)):
            raise ValueError(f"{name} is {other} there and {own} here")
    others = model.others
    if taken := sorted(base.modules.keys() & others.keys()):
        raise ValueError(f"the model's own tensors have its names: {list_names(taken)}")
    for match in filter(None, map(NUMBERED.fullmatch, base.modules)):
        layers = match[1].removesuffix(f"{match[2]}.")
        if not any(name.startswith(layers) for name in others):
            raise ValueError(f"it names layers {layers}N, and the model does not")


def _find_text(config: ConfigDict) -> ConfigDict:
    """The part of a config that describes the text model: all of it, unless the model sees pictures, too."""
    return section(config, "text_config") or config


def _select_fields(config: ConfigDict) -> dict[str, Any]:
    """The fields of a config that tell of its modules."""
    return {name: value for name, value in _find_text(config).items() if FIELDS.search(name)}


def _write_folder(model: Checkpoint, modules: Mapping[str, Tensor], fields: ConfigDict, folder: Path) -> None:
    """Write the copy to an empty folder. fields: to be set in its config."""
    for file in model.folder.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", INDEX, *OTHER_WEIGHTS)):
            shutil.copyfile(file, folder / file.name)
    if (model.folder / TEMPLATES).is_dir():
        shutil.copytree(model.folder / TEMPLATES, folder / TEMPLATES)
    text = _find_text(model.config)
    if text != (whole := {**text, **fields}):
        config = {**model.config, "text_config": whole} if "text_config" in model.config else whole
        _write_json(folder / CONFIG, config)

    placed = dict.fromkeys(modules, SHARD)
    for name, (tensors, metadata) in model.files.items():
        kept, file = {each: tensors[each] for each in tensors if each not in model.modules}, folder / name
        if name == WEIGHTS:
            file = folder / ONLY
        if len(kept) == len(tensors):
            shutil.copyfile(model.folder / name, file)
        elif kept:
            save_file(kept, file, dict(metadata))
        placed |= dict.fromkeys(kept, file.name)
    save_file(dict(modules), folder / SHARD, {"format": "pt"})
    size = sum(tensor.nbytes for tensor in (*model.others.values(), *modules.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
    _write_json(folder / f"{WEIGHTS}{INDEX}", index)


def _write_json(file: Path, content: ConfigDict) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
