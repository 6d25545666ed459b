"""Heads as folders: `load_head` reads every published format strictly, `save_head` writes one."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from heads.atomic_write import write_aside
from heads.formats.eagle import refuse_unknown
from heads.formats.layout import (
    OWN,
    Layout,
    TargetSizes,
    assemble,
    choose_dtype,
    convert,
    list_names,
    name_target,
    read_own,
    read_token_map,
    section,
)
from heads.formats.weight_files import CONFIG, NAMES, WEIGHTS, read_json, read_weights
from heads.kinds import KINDS, Kind, get_kind
from heads.vocabulary import HeadConfig, VocabularyHead

WHOLE = "model.layers.", "model.language_model.", "language_model."  # begin the names of a whole model's tensors


def load_head(
    folder: str | Path, dtype: torch.dtype | None = None, vocab_size: int | None = None, layers: int | None = None
) -> VocabularyHead:
    """A head from a local folder, ours or a published one, on the CPU.

    dtype: of its weights; None keeps the file's. vocab_size, layers: the target's, for files without them. Embeddings
    and an output matrix in the file are the head's own, until `share` finds that they are copies of the target's.
    Raises ValueError if there is no head, if it is damaged, or with the names of missing, unexpected or wrong tensors.
    """
    with _reading(folder) as path:
        return assemble(*_read(path, TargetSizes(vocab_size, layers)), dtype)


def find_kind(folder: str | Path) -> str:
    """The kind of the head in a folder, from its config and the names of its tensors alone.

    Raises ValueError as `load_head` does if the folder holds no head. Whether the head is complete and fits a target is
    not checked.
    """
    with _reading(folder) as path:
        tensors, metadata = read_weights(path)
        return _find_kind(tensors, _read_config(path, metadata)).name


def read_target(folder: str | Path) -> HeadConfig:
    """What the folder of a head tells of the target that it was trained for: its name and sizes; None if unknown.

    A head in a whole model is for that model. Nothing is checked, and a kind of one's own need not be known. Raises
    ValueError if the folder has no weights or damaged ones.
    """
    with _reading(folder) as path:
        tensors, metadata = read_weights(path)
        config = _read_config(path, metadata)
        own = section(config, OWN)
        if "kind" in own:
            known: dict[str, Any] = {each.name: own.get(each.name) for each in fields(HeadConfig)}
        else:
            known = {"vocab_size": config.get("vocab_size")}
            is_whole = any(name.startswith(WHOLE) for name in tensors)
            known["target_name"] = str(path) if is_whole else name_target(config)
        sizes = own if "kind" in own else config
        known["hidden_size"] = sizes.get("target_hidden_size") or sizes.get("hidden_size")
        return HeadConfig(**known)


def _read(path: Path, sizes: TargetSizes) -> tuple[type[VocabularyHead], Layout, Mapping[str, Tensor]]:
    """The class, the layout and the tensors of the head in a folder."""
    tensors, metadata = read_weights(path)
    config = _read_config(path, metadata)
    own, kind = section(config, OWN), _find_kind(tensors, config)
    tensors = read_token_map(tensors, own)
    if "kind" in own:
        return kind.network, read_own(kind.config, kind.format.for_servers, own, tensors), tensors
    assert kind.format.read is not None
    return kind.network, kind.format.read(tensors, config, sizes), tensors


@contextmanager
def _reading(folder: str | Path) -> Iterator[Path]:
    """The path of a head's folder; an error while it is read names the folder."""
    path = find_folder(folder)
    try:
        yield path
    except ValueError as error:
        raise ValueError(f"cannot load a head from {str(folder)!r}: {error}") from error


def find_folder(folder: str | Path) -> Path:
    """The path of a head's folder. Raises ValueError if it does not exist; heads are not downloaded from a hub."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(
            f"cannot load a head from {str(folder)!r}: there is no such local folder; heads of the hub are fetched by "
            "hf download NAME --local-dir FOLDER"
        )
    return path


def save_head(head: VocabularyHead, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Save a head in a new folder, or replace the head saved there. dtype: of the weights; None keeps the head's.

    Files are replaced atomically and the weights contain the config, so a kill or a full disk leaves a whole head.
    docs/serving-and-check.md lists the servers that load it. Raises ValueError if the folder holds something else.
    """
    path = Path(folder)
    check_overwrite(path)
    kind = get_kind(head.kind)
    states, config = kind.format.export(head)
    origin = {"origin": kind.origin} if kind.origin else {}
    config[OWN] = {"kind": kind.name, **origin, **asdict(head.config), **config.get(OWN, {})}
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


def _find_kind(names: Collection[str], config: dict[str, Any]) -> Kind:
    """The kind of a head with these names of tensors. Raises ValueError if it is of no known kind."""
    own = section(config, OWN)
    if "kind" in own:
        return get_kind(str(own["kind"]), str(own.get("origin", "")))
    found = next((kind for kind in KINDS.values() if kind.format.recognizes(names)), None)
    if found is not None:
        return found
    refuse_unknown(config)
    if "fc.weight" in names:
        raise ValueError("it seems to be an EAGLE head without attention (layers.0.self_attn or midlayer.self_attn)")
    if any(name.startswith(WHOLE) for name in names):
        raise ValueError("it seems to be a whole model without heads and without an MTP module")
    raise ValueError(f"its tensors are of no known head: {list_names(sorted(names))}")


def _read_config(folder: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The config in the weights' metadata, else config.json, which can be older if a save was interrupted."""
    if OWN in metadata:
        return dict(json.loads(metadata[OWN]))
    return read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
