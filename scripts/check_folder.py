"""A head's folder as servers see it, and what can be found in it.

Servers read `config.json` and the tensors; the note that our own weights carry along is for us alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from heads.formats.eagle import LAYER
from heads.formats.eagle3 import MIDLAYER, NESTED
from heads.formats.layout import OWN, ConfigDict, count, extent, section
from heads.formats.medusa import BLOCKS, PREFIXES
from heads.formats.weight_files import CONFIG, read_json, read_weights

Level = Literal["error", "warning", "note"]
Engine = Literal["vllm", "sglang", "both", "draftless"]
NUMBERED = re.compile(r"layers\.(\d+)\.")
HYDRA = ("grounded.{}.linear.weight", "hydra_mlp.{}.{}.linear.weight")


@dataclass(frozen=True)
class Finding:
    """Something to know about a folder: an error keeps an engine from serving it as it was trained."""

    level: Level
    engine: Engine
    name: str  # stable, for programs to look for
    text: str  # what it is and what to do, in one line


@dataclass(frozen=True)
class HeadFolder:
    """The content of a head's folder."""

    path: Path
    tensors: Mapping[str, Tensor]
    said: ConfigDict  # config.json
    note: ConfigDict  # what our own weights say of themselves

    @cached_property
    def words(self) -> ConfigDict:
        """The config's words for the head's layer, from wherever its format keeps them."""
        return {**self.said, **section(self.said, NESTED)}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @cached_property
    def kind(self) -> str | None:
        """The method, by the names of the tensors; None where they are no head's that is known."""
        return find_kind(self.tensors)

    @property
    def speculators(self) -> bool:
        """Whether it is in the format of vLLM's speculators."""
        return NESTED in self.said or "speculators_model_type" in self.said

    @property
    def prefix(self) -> str:
        """What the names of an EAGLE head's first layer begin with."""
        return MIDLAYER if any(name.startswith(MIDLAYER) for name in self.tensors) else LAYER

    @property
    def layers(self) -> int:
        """How many decoder layers the file has."""
        numbered = {int(match[1]) for match in map(NUMBERED.match, self.tensors) if match}
        return len(numbered | ({0} if self.prefix == MIDLAYER else set()))

    @property
    def architectures(self) -> list[str]:
        named = self.said.get("architectures") or []
        return [str(name) for name in named] if isinstance(named, list) else [str(named)]

    def rows(self, name: str) -> int | None:
        """The rows of a tensor, None where it is not there."""
        return extent(self.shapes, [name], 0) if name in self.shapes else None


def read_folder(path: Path) -> HeadFolder:
    """Read a folder. Raises ValueError where a file of it is missing, damaged or cut short."""
    if not path.is_dir():
        raise ValueError(f"there is no such local folder: {path}")
    tensors, notes = read_weights(path)
    said = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    return HeadFolder(path, tensors, said, _read_note(notes))


def _read_note(notes: Mapping[str, str]) -> dict[str, Any]:
    note = json.loads(notes.get(OWN, "{}"))
    return note if isinstance(note, dict) else {}


def find_kind(names: Collection[str]) -> str | None:
    """The method that a head's tensors belong to, by their names."""
    if any(name.startswith(MIDLAYER) for name in names) or f"{LAYER}hidden_norm.weight" in names:
        return "eagle3"
    if "fc.weight" in names and any(name.startswith(f"{LAYER}self_attn.") for name in names):
        return "eagle"
    if any(count(form, names) for form in HYDRA):
        return "hydra"
    forms = [f"{prefix}{block}.weight" for prefix in PREFIXES for block in BLOCKS]
    return "medusa" if any(count(form, names) for form in forms) else None
