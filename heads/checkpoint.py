"""Heads as folders: every published layout read strictly, one layout written.

A folder that we write holds `config.json` and `model.safetensors`. A Medusa head's loads in vLLM (<= 0.32) too, and
an EAGLE head's in vLLM 0.33 and SGLang 0.5.23.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from heads.atomic_write import write_aside
from heads.eagle import EagleHead
from heads.eagle3 import Eagle3Head
from heads.formats.eagle import export_eagle, read_eagle
from heads.formats.eagle3 import export_eagle3, read_eagle3
from heads.formats.hydra import read_hydra
from heads.formats.layout import OWN, Head, Layout
from heads.formats.medusa import export_medusa, read_medusa
from heads.formats.token_map import MAP, order_vocabulary, read_token_map
from heads.formats.weight_files import CONFIG, NAMES, WEIGHTS, read_json, read_weights
from heads.medusa import MedusaHead

SHOWN = 4  # names of each sort in an error


def load_head(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    layers: int | None = None,
) -> Head:
    """Load a head from a local folder, ours or a published one, onto the CPU.

    dtype: of its weights; None keeps the file's. vocab_size: how many tokens its target has, for the files that do
    not say it (heads without an output matrix of their own). layers: how many layers its target has, for EAGLE-3
    files that do not say which of them they read (the authors' own). A head out of a whole Medusa-2 model fits that
    model only. Raises ValueError where there is no head, where it is damaged, and with the names of tensors that are
    missing, unexpected or of the wrong shape.
    """
    place = find_folder(folder)
    try:
        tensors, notes = read_weights(place)
        said = _read_config(place, notes)
        tensors = read_token_map(tensors, said)
        layout = recognise(tensors, said, vocab_size, layers)
        return _assemble(layout, tensors, dtype)
    except ValueError as error:
        raise ValueError(f"cannot load a head from {str(folder)!r}: {error}") from error


def find_folder(folder: str | Path) -> Path:
    """The path of a head's folder. Raises ValueError where there is none: heads are not fetched from a hub."""
    place = Path(folder)
    if not place.is_dir():
        raise ValueError(f"cannot load a head from {str(folder)!r}: there is no such local folder")
    return place


def save_head(head: Head, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write a head's folder; made where it is missing, and replaced where it holds a head that we wrote.

    dtype: of the weights in the file; None keeps the head's. Each file is replaced whole, and the weights carry
    their config along, so that a kill or a full disk at any moment leaves a folder that loads. Raises ValueError as
    `check_folder` does, and where a Medusa head has not borrowed the target's matrix: vLLM wants it in the file.
    """
    place = Path(folder)
    check_folder(place)
    states, described = _export(head)
    stored = {name: _store(tensor, dtype) for name, tensor in states.items()}
    kept = dtype or next(head.parameters()).dtype
    described["torch_dtype"] = str(kept).removeprefix("torch.")  # servers take theirs for granted where none is said
    place.mkdir(parents=True, exist_ok=True)
    weights = save(stored, {"format": "pt", OWN: json.dumps(described)})
    write_aside(place / WEIGHTS, lambda file: file.write(weights))
    write_aside(place / CONFIG, lambda file: file.write(_format(described).encode()))


def _format(described: dict[str, Any]) -> str:
    """A config as JSON, lists of numbers in a line: a token map would be thousands."""
    return re.sub(r"\[[\d\s,]*]", lambda numbers: " ".join(numbers[0].split()), json.dumps(described, indent=2))


def _export(head: Head) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a head's file and its config hold: as servers want them, and in our own words beside."""
    states: dict[str, Tensor] = dict(head.state_dict())
    described: dict[str, Any] = {"model_type": head.kind}
    if isinstance(head, MedusaHead):
        states, described = export_medusa(head)
    elif isinstance(head, EagleHead):
        states, described = export_eagle(head)
    elif isinstance(head, Eagle3Head):
        states, described = export_eagle3(head)
    return states, described | {OWN: {"kind": head.kind, **asdict(head.config), **described.get(OWN, {})}}


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


def recognise(
    tensors: Mapping[str, Tensor], said: Mapping[str, Any], vocab_size: int | None = None, layers: int | None = None
) -> Layout:
    """The layout of a head's tensors. Raises ValueError where they are no head's that we know."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layout = read_hydra(shapes, said, vocab_size) or read_medusa(shapes, said, vocab_size)
    layout = layout or read_eagle3(shapes, said, vocab_size, layers) or read_eagle(shapes, said, vocab_size)
    if layout is not None:
        return layout
    if "fc.weight" in shapes:
        raise ValueError(
            "it seems to be an EAGLE head, but has no attention (layers.0.self_attn or midlayer.self_attn)"
        )
    if any(name.startswith("model.layers.") for name in shapes):
        raise ValueError("it seems to be a whole model without heads")
    raise ValueError(f"its tensors are no head's that is known: {_list(sorted(shapes))}")


def _read_config(folder: Path, notes: Mapping[str, str]) -> dict[str, Any]:
    """What the weights say of themselves, else config.json: a save that was cut short may have left an older one."""
    if OWN in notes:
        return dict(json.loads(notes[OWN]))
    return read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}


def _assemble(layout: Layout, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Head:
    states = {ours: tensors[name] for name, ours in layout.names.items() if name in tensors}
    if MAP in states:
        order_vocabulary(states, layout.config.vocab_size)
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


def _refuse_misfits(
    layout: Layout, tensors: Mapping[str, Tensor], states: Mapping[str, Tensor], expected: Mapping[str, torch.Size]
) -> None:
    """Raise ValueError with the file's names of what is missing, unexpected or not as it should be."""
    wrong = []
    for name, ours in layout.names.items():
        state = states.get(ours)
        if state is not None and state.shape != expected[ours]:
            wrong.append(f"{name} is {list(tensors[name].shape)}, not {list(expected[ours])}")
        elif state is not None and not state.is_floating_point() and ours != MAP:
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
