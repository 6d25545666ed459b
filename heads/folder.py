"""Heads as folders: every published layout read strictly, one layout written.

A folder that we write holds `config.json` and `model.safetensors`. A Medusa head's loads in vLLM (<= 0.32) too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from heads.hydra import HydraHead
from heads.hydra_layouts import read_hydra
from heads.layout import OWN, Layout
from heads.medusa import MedusaHead
from heads.medusa_layouts import read_medusa, vllm_config
from heads.weight_files import CONFIG, NAMES, WEIGHTS, read_json, read_weights

SHOWN = 4  # names of each sort in an error


def load_head(
    folder: str | Path, dtype: torch.dtype | None = None, vocab_size: int | None = None
) -> MedusaHead | HydraHead:
    """Load a head from a local folder, ours or a published one, onto the CPU.

    dtype: of its weights; None keeps the file's. vocab_size: how many tokens its target has, for the files that do
    not say it (heads without an output matrix of their own). A head out of a whole Medusa-2 model fits that model
    only. Raises ValueError where there is no head, where it is damaged, and with the names of tensors that are
    missing, unexpected or of the wrong shape.
    """
    place = Path(folder)
    if not place.is_dir():
        raise ValueError(f"cannot load a head from {str(folder)!r}: there is no such local folder")
    try:
        tensors, notes = read_weights(place)
        said = _read_config(place, notes)
        layout = recognise(tensors, said, vocab_size)
        return _assemble(layout, tensors, dtype)
    except ValueError as error:
        raise ValueError(f"cannot load a head from {str(folder)!r}: {error}") from error


def save_head(head: MedusaHead | HydraHead, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write a head's folder; made where it is missing, and replaced where it holds a head that we wrote.

    dtype: of the weights in the file; None keeps the head's. Each file is replaced whole, and the weights carry
    their config along, so that a kill or a full disk at any moment leaves a folder that loads. Raises ValueError as
    `check_folder` does, and where a Medusa head has not borrowed the target's matrix: vLLM wants it in the file.
    """
    place = Path(folder)
    check_folder(place)
    states = dict(head.state_dict())
    described: dict[str, Any] = {"model_type": head.kind, OWN: {"kind": head.kind, **asdict(head.config)}}
    if isinstance(head, MedusaHead):
        described |= vllm_config(head.config)
        if head.output == "target":  # vLLM knows no such thing: write the rows
            states["lm_head.weight"] = head.vocabulary(0)[0]
    stored = {name: _store(tensor, dtype) for name, tensor in states.items()}
    place.mkdir(parents=True, exist_ok=True)
    _replace(place / WEIGHTS, save(stored, {"format": "pt", OWN: json.dumps(described)}))
    _replace(place / CONFIG, json.dumps(described, indent=2).encode())


def check_folder(folder: str | Path) -> None:
    """Raise ValueError where a head saved there would replace something else, such as the target itself."""
    place = Path(folder)
    if place.exists() and not place.is_dir():
        raise ValueError(f"cannot save a head as {str(folder)!r}: it is a file; name a folder")
    held = [name for name in (*NAMES, CONFIG) if (place / name).exists()]
    try:
        ours = not held or (held[0] == WEIGHTS and OWN in _read_config(place, read_weights(place)[1]))
    except ValueError:
        ours = False
    if not ours:
        raise ValueError(f"cannot save a head in {str(folder)!r}: it holds something else ({_list(held)})")


def recognise(tensors: Mapping[str, Tensor], said: Mapping[str, Any], vocab_size: int | None = None) -> Layout:
    """The layout of a head's tensors. Raises ValueError where they are no head's that we know."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layout = read_hydra(shapes, said, vocab_size) or read_medusa(shapes, said, vocab_size)
    if layout is not None:
        return layout
    if "fc.weight" in shapes:
        raise ValueError("it seems to be an EAGLE head; Medusa and Hydra heads can be loaded")
    if any(name.startswith("model.layers.") for name in shapes):
        raise ValueError("it seems to be a whole model without heads")
    raise ValueError(f"its tensors are no head's that is known: {_list(sorted(shapes))}")


def _read_config(folder: Path, notes: Mapping[str, str]) -> dict[str, Any]:
    """What the weights say of themselves, else config.json: a save that was cut short may have left an older one."""
    if OWN in notes:
        return dict(json.loads(notes[OWN]))
    return read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}


def _assemble(layout: Layout, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> MedusaHead | HydraHead:
    states = {ours: tensors[name] for name, ours in layout.names.items() if name in tensors}
    if "token_map" in states:
        _order_vocabulary(states, layout.config.vocab_size)
    with torch.device("meta"):
        head = layout.build()
    expected = {name: state.shape for name, state in head.state_dict().items()}
    expected["borrowed"] = torch.Size([head.draft_size, head.hidden_size])
    _refuse_misfits(layout, tensors, states, expected)
    dtype = dtype or next(state.dtype for state in states.values() if state.is_floating_point())
    for name, state in states.items():  # copies, for they are views of a file yet
        kept = dtype if state.is_floating_point() else state.dtype
        states[name] = state.to(kept, copy=True, memory_format=torch.contiguous_format)
    head.borrowed = states.pop("borrowed", None)
    head.load_state_dict(states, assign=True)
    return head


def _order_vocabulary(states: dict[str, Tensor], vocab_size: int) -> None:
    """Bring the token map into ascending order, and the matrices' rows into its own.

    vLLM lets a matrix have a row for each of the target's tokens; the map then says which are used.
    """
    tokens = states.pop("token_map")
    whole = tokens.ndim == 1 and not tokens.is_floating_point() and tokens.unique().numel() == tokens.numel() > 0
    if not whole or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"its token_map must be a list of different tokens, each below {vocab_size}")
    tokens, order = tokens.long().sort()
    for name, rows in states.items():
        if name.startswith(("lm_head", "borrowed")) and rows.shape[:1] in ((len(tokens),), (vocab_size,)):
            states[name] = rows[order if len(rows) == len(tokens) else tokens]
    if len(tokens) < vocab_size:
        states["token_map"] = tokens


def _refuse_misfits(
    layout: Layout, tensors: Mapping[str, Tensor], states: Mapping[str, Tensor], expected: Mapping[str, torch.Size]
) -> None:
    """Raise ValueError with the file's names of what is missing, unexpected or not as it should be."""
    wrong = []
    for name, ours in layout.names.items():
        state = states.get(ours)
        if state is not None and state.shape != expected[ours]:
            wrong.append(f"{name} is {list(tensors[name].shape)}, not {list(expected[ours])}")
        elif state is not None and not state.is_floating_point() and ours != "token_map":
            wrong.append(f"{name} is of {state.dtype}, not of a floating-point type")
    faults = {
        "missing": [name for name in layout.names if name not in tensors],
        "unexpected": [name for name in tensors if name not in layout.names and name not in layout.passed_over],
        "wrong": wrong,
    }
    if found := [f"{fault}: {_list(names)}" for fault, names in faults.items() if names]:
        raise ValueError("; ".join(found))


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _store(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """As it goes to the file; whole numbers keep their type."""
    kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
    return tensor.detach().to("cpu", kept).contiguous()


def _replace(path: Path, content: bytes) -> None:
    """Put a file in place whole or not at all."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
