"""The state of a training on disk: everything needed to resume bit for bit.

Not accelerate's `save_state`: it writes several files, so a kill can leave a mix of two steps.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch

from decode.models.fingerprint import find_changes
from heads.atomic_write import write_aside

CHECKPOINT, METRICS = "checkpoint.pt", "metrics.jsonl"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Replace the folder's checkpoint; a kill or a full disk leaves the old one intact."""
    write_aside(folder / CHECKPOINT, lambda file: torch.save(state, file))


def load_checkpoint(
    folder: Path, settings: dict[str, Any], fingerprints: dict[str, Any], changed_model: bool = False
) -> dict[str, Any] | None:
    """The folder's state, or None without a checkpoint.

    Raises ValueError if it is damaged, has other settings, or is of a model with other fingerprints, unless that may
    have changed.
    """
    file = folder / CHECKPOINT
    if not file.exists():
        return None
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        begun = state["settings"]
    except (RuntimeError, pickle.UnpicklingError, EOFError, LookupError, TypeError) as error:
        raise ValueError(f"{file} is damaged, or no checkpoint of a training; begin anew in another folder") from error
    names = [*settings, *(name for name in begun if name not in settings and name not in fingerprints)]
    changed = [name for name in names if begun.get(name) != settings.get(name)]
    if changed:
        listed = ", ".join(f"{name} was {begun.get(name)!r}, now {settings.get(name)!r}" for name in changed)
        raise ValueError(f"the training in {folder} was begun with other settings: {listed}; resume with the same")
    if not changed_model and (changes := find_changes(begun, fingerprints)):
        raise ValueError(
            f"the model's {changes} changed since the training in {folder} was begun; give another --out, or go on "
            "with --changed-model"
        )
    return state


class Metrics:
    """`metrics.jsonl`, one line per logged step. Lines after the resumed checkpoint's step are removed."""

    def __init__(self, folder: Path, step: int) -> None:
        self.file = folder / METRICS
        text = "".join(json.dumps(row) + "\n" for row in read_metrics(folder) if row["step"] <= step)
        write_aside(self.file, lambda file: file.write(text.encode()))

    def add(self, **row: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All complete lines of the folder's metrics. Raises ValueError if one is damaged."""
    file = folder / METRICS
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); remove it to go on without") from error
