"""The files that heads' weights are published in: found in a folder, and read without running anything in them."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = ".index.json"
# In order: a head's own file comes before the whole model that may lie beside it.
NAMES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
    WEIGHTS,
    WEIGHTS + INDEX,
    "pytorch_model.bin",
    "pytorch_model.bin" + INDEX,
)


def find_weights(folder: Path) -> list[Path]:
    """The file that holds the weights, or the shards that it lists. Raises ValueError where there is none."""
    found = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if found is None:
        raise ValueError(f"it holds none of {', '.join(NAMES)}")
    if not found.name.endswith(INDEX):
        return [found]
    listed = read_json(found).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{found.name} has no weight_map that says where its tensors are")
    names = sorted({str(name) for name in listed.values()})
    if missing := [name for name in names if Path(name).name != name or not (folder / name).is_file()]:
        raise ValueError(f"{found.name} lists files that are not there: {', '.join(missing)}")
    return [folder / name for name in names]


def read_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors by name, on the CPU, and what a safetensors file says beside them.

    The tensors are views of the files, so what is not used is never read; copy what is kept.
    """
    tensors: dict[str, Tensor] = {}
    notes: dict[str, str] = {}
    for path in find_weights(folder):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt") as file:
                    tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                    notes |= file.metadata() or {}
            else:
                tensors |= _unpickle(path)
        except pickle.UnpicklingError as error:  # its own text tells how to run what is in the file
            raise ValueError(f"{path.name} is damaged, or holds more than tensors, which is not read") from error
        except Exception as error:  # whatever the readers of three formats make of a damaged file
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{path.name} is damaged or cut short: {reason or type(error).__name__}") from error
    for name, kept in notes.items():  # a layer that stands twice in a network is written once, as safetensors notes
        if kept in tensors:
            tensors.setdefault(name, tensors[kept])
    return tensors, notes


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's object. Raises ValueError where it holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content


def _unpickle(path: Path) -> dict[str, Tensor]:
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise pickle.UnpicklingError("no dictionary of tensors")
    return content
