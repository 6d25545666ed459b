"""Heads as folders: `load_head` reads every published format strictly, `save_head` writes one."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from heads.atomic_write import write_aside
from heads.formats.dflash import export_dflash, is_dflash, read_dflash
from heads.formats.eagle import (
    export_eagle,
    export_eagle3,
    export_peagle,
    is_eagle,
    is_eagle3,
    is_peagle,
    read_eagle,
    read_eagle3,
    refuse_unknown,
)
from heads.formats.layout import (
    OWN,
    Head,
    Layout,
    assemble,
    choose_dtype,
    convert,
    list_names,
    read_own,
    read_token_map,
    section,
)
from heads.formats.medusa import export_medusa, is_hydra, is_medusa, read_hydra, read_medusa
from heads.formats.mtp import is_mtp, read_mtp
from heads.formats.weight_files import CONFIG, NAMES, WEIGHTS, read_json, read_weights

# Published heads by their tensors' names, in this order; then EAGLE heads, whose config is checked first.
RECOGNIZED: dict[str, Any] = {"mtp": is_mtp, "hydra": is_hydra, "medusa": is_medusa, "dflash": is_dflash}
READERS: dict[str, Any] = {"hydra": read_hydra, "medusa": read_medusa, "eagle": read_eagle}
EXPORTS: dict[str, Any] = {
    "medusa": export_medusa,
    "eagle": export_eagle,
    "eagle3": export_eagle3,
    "peagle": export_peagle,
    "dflash": export_dflash,
}


def load_head(
    folder: str | Path, dtype: torch.dtype | None = None, vocab_size: int | None = None, layers: int | None = None
) -> Head:
    """A head from a local folder, ours or a published one, on the CPU.

    dtype: of its weights; None keeps the file's. vocab_size, layers: the target's, for files without them. Embeddings
    and an output matrix in the file are the head's own, until `share` finds that they are copies of the target's.
    Raises ValueError if there is no head, if it is damaged, or with the names of missing, unexpected or wrong tensors.
    """
    path = find_folder(folder)
    try:
        return assemble(*_read(path, vocab_size, layers), dtype)
    except ValueError as error:
        raise ValueError(f"cannot load a head from {str(folder)!r}: {error}") from error


def find_kind(folder: str | Path) -> str:
    """The kind of the head in a folder, from its config and the names of its tensors alone.

    Raises ValueError as `load_head` does if the folder holds no head. Whether the head is complete and fits a target is
    not checked.
    """
    path = find_folder(folder)
    try:
        tensors, metadata = read_weights(path)
        config = _read_config(path, metadata)
        own = section(config, OWN)
        if "kind" not in own:
            return _recognize(tensors, config)
        read_own(own, tensors)  # refuses an unknown kind
    except ValueError as error:
        raise ValueError(f"cannot load a head from {str(folder)!r}: {error}") from error
    return str(own["kind"])


def _read(path: Path, vocab_size: int | None, layers: int | None) -> tuple[Layout, Mapping[str, Tensor]]:
    """The layout and the tensors of the head in a folder."""
    tensors, metadata = read_weights(path)
    config = _read_config(path, metadata)
    own = section(config, OWN)
    tensors = read_token_map(tensors, own)
    if "kind" in own:
        return read_own(own, tensors), tensors
    kind = _recognize(tensors, config)
    if kind == "mtp":
        return read_mtp(tensors, config)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if kind in ("dflash", "eagle3", "peagle"):
        reads_layers = read_dflash if kind == "dflash" else read_eagle3
        return reads_layers(shapes, config, vocab_size, layers), tensors
    return READERS[kind](shapes, config, vocab_size), tensors


def find_folder(folder: str | Path) -> Path:
    """The path of a head's folder. Raises ValueError if it does not exist; heads are not downloaded from a hub."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"cannot load a head from {str(folder)!r}: there is no such local folder")
    return path


def save_head(head: Head, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Save a head in a new folder, or replace the head saved there. dtype: of the weights; None keeps the head's.

    Files are replaced atomically and the weights contain the config, so a kill or a full disk leaves a whole head.
    docs/serving-and-check.md lists the servers that load it. Raises ValueError if the folder holds something else.
    """
    path = Path(folder)
    check_overwrite(path)
    export = EXPORTS.get(head.kind, lambda head: (head.state_dict(), {"model_type": head.kind}))
    states, config = export(head)
    config[OWN] = {"kind": head.kind, **asdict(head.config), **config.get(OWN, {})}
    saved_dtype = dtype or next(head.parameters()).dtype
    config["torch_dtype"] = str(saved_dtype).removeprefix("torch.")  # without it, servers assume the target's
    path.mkdir(parents=True, exist_ok=True)
    stored = {name: convert(tensor, choose_dtype(head, name, dtype)).cpu() for name, tensor in states.items()}
    weights = save(stored, {"format": "pt", OWN: json.dumps(config)})
    write_aside(path / WEIGHTS, lambda file: file.write(weights))
    write_aside(path / CONFIG, lambda file: file.write(_format(config).encode()))


def check_overwrite(path: Path) -> None:
    """Raise ValueError if saving a head there would replace something else, such as the target."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"cannot save a head as {str(path)!r}: it is a file; name a folder")
    held = [name for name in (*NAMES, CONFIG) if (path / name).exists()]
    with suppress(ValueError):
        if not held or (held[0] == WEIGHTS and OWN in _read_config(path, read_weights(path)[1])):
            return
    raise ValueError(f"cannot save a head in {str(path)!r}: it holds something else ({list_names(held)})")


def is_saved_head(folder: Path) -> bool:
    """Whether a folder was made by `save_head`. Raises ValueError if it is damaged."""
    return (folder / WEIGHTS).is_file() and OWN in read_weights(folder)[1]


def _format(config: dict[str, Any]) -> str:
    """A config as JSON with each list of numbers on one line: a token map has thousands."""
    return re.sub(r"\[[\d\s,]*]", lambda numbers: " ".join(numbers[0].split()), json.dumps(config, indent=2))


def _recognize(names: Collection[str], config: dict[str, Any]) -> str:
    """The kind of a published head with these names of tensors. Raises ValueError if it is of no known kind."""
    if found := next((kind for kind, is_kind in RECOGNIZED.items() if is_kind(names)), None):
        return found
    refuse_unknown(config)
    if is_eagle3(names):
        return "peagle" if is_peagle(names) else "eagle3"
    if is_eagle(names):
        return "eagle"
    if "fc.weight" in names:
        raise ValueError("it seems to be an EAGLE head without attention (layers.0.self_attn or midlayer.self_attn)")
    if any(name.startswith(("model.layers.", "model.language_model.", "language_model.")) for name in names):
        raise ValueError("it seems to be a whole model without heads and without an MTP module")
    raise ValueError(f"its tensors are of no known head: {list_names(sorted(names))}")


def _read_config(folder: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The config in the weights' metadata, else config.json, which can be older if a save was interrupted."""
    if OWN in metadata:
        return dict(json.loads(metadata[OWN]))
    return read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
