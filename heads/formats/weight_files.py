"""Weight files of published heads: found in a folder, and read without running code from them."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from heads.formats.layout import list_names

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
POINTER = b"version https://git-lfs.github.com/spec"  # begins the text that Git LFS puts in place of a file
INDEX = ".index.json"
NAMES = (  # in this order: a head's own file comes before a whole model in the same folder
    *(f"{kind}_lm_head.{suffix}" for kind in ("medusa", "hydra") for suffix in ("safetensors", "pt")),
    *(name + index for name in (WEIGHTS, "pytorch_model.bin") for index in ("", INDEX)),
)


def refuse_pointer(path: Path) -> None:
    """Raise ValueError for a Git LFS pointer in the place of a file."""
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise ValueError(f"{path.name} is a Git LFS pointer, not the file itself; run git lfs pull in its folder")


def find_weights(folder: Path, names: Sequence[str] = NAMES) -> tuple[list[Path], dict[str, str]]:
    """The weight file, or the shards that an index lists, and the index: the file of each tensor.

    names: of a weight file or an index; the first that the folder has is taken. Raises ValueError if it has none, or if
    files are missing.
    """
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise ValueError(f"it holds none of {', '.join(names)}")
    if not found.name.endswith(INDEX):
        return [found], {}
    listed = read_json(found).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{found.name} has no weight_map from tensors to files")
    shards = sorted({str(name) for name in listed.values()})
    if missing := [name for name in shards if Path(name).name != name or not (folder / name).is_file()]:
        raise ValueError(f"{found.name} lists files that do not exist: {', '.join(missing)}")
    return [folder / name for name in shards], listed


def read_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors by name, on the CPU, and the metadata of safetensors files.

    The tensors are memory-mapped, so unused ones are never read; copy what you keep. Raises ValueError if a file is
    missing, is damaged or holds more than tensors.
    """
    tensors, metadata = dict[str, Tensor](), dict[str, str]()
    paths, index = find_weights(folder)
    for path in paths:
        held, notes = read_weight_file(path)
        tensors, metadata = tensors | held, metadata | notes
    for name, original in metadata.items():  # safetensors stores a shared tensor once and lists its other names here
        if original in tensors:
            tensors.setdefault(name, tensors[original])
    if lost := [f"{name} in {file}" for name, file in index.items() if name not in tensors]:
        raise ValueError(f"the index lists tensors that its files do not hold: {list_names(lost)}")
    return tensors, metadata


def read_weight_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of one file and its metadata, as in `read_weights`."""
    refuse_pointer(path)
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                return tensors, file.metadata() or {}
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise pickle.UnpicklingError("no dictionary of tensors")
        return content, {}
    except pickle.UnpicklingError as error:  # torch's own text explains how to run the pickle's code
        raise ValueError(f"{path.name} is damaged, or holds more than tensors, which is not read") from error
    except Exception as error:  # three formats' readers raise many types for a damaged file
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path.name} is damaged or cut short: {reason or type(error).__name__}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's object. Raises ValueError if it is not JSON or not an object."""
    refuse_pointer(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content
