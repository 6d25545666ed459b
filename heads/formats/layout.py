"""How a file names a head's tensors, and what their shapes say of the head. Pure functions of names, shapes, config.

What keys or shapes say is never taken from the config: published ones are wrong about it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from heads.eagle import EagleConfig, EagleHead
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.hydra import HydraConfig, HydraHead
from heads.medusa import MedusaConfig, MedusaHead

Shapes = Mapping[str, Sequence[int]]
Said = Mapping[str, Any]  # the content of config.json

Config: TypeAlias = MedusaConfig | HydraConfig | EagleConfig | Eagle3Config
Head: TypeAlias = MedusaHead | HydraHead | EagleHead | Eagle3Head

OWN = "draftless"  # what we add to a config, and the weights' note of their own


@dataclass(frozen=True)
class Layout:
    """A head as one file has it."""

    config: Config
    names: dict[str, str]  # the file's name of each tensor that the head needs -> ours
    passed_over: Set[str] = frozenset()  # what may stand in the file beside them

    def build(self) -> Head:
        """The head, its weights still to be loaded."""
        match self.config:
            case MedusaConfig():
                return MedusaHead(self.config)
            case HydraConfig():
                return HydraHead(self.config)
            case EagleConfig():
                return EagleHead(self.config)
            case Eagle3Config():
                return Eagle3Head(self.config)


def count(form: str, names: Iterable[str]) -> tuple[int, ...]:
    """For each {} of a form such as "blocks.{}.layers.{}.weight", 1 + the highest number in it; () where none fits."""
    pattern = re.compile(re.escape(form).replace(r"\{\}", r"(\d+)"))
    found = [tuple(map(int, match.groups())) for match in map(pattern.fullmatch, names) if match]
    return tuple(1 + max(column) for column in zip(*found, strict=True))


def extent(shapes: Shapes, names: Iterable[str], axis: int, otherwise: int = 1) -> int:
    """The extent of the first of these tensors that is there; where none is, the check of names says so later."""
    shape: Sequence[int] = next((shapes[name] for name in names if name in shapes), ())
    return shape[axis] if axis < len(shape) else otherwise


def section(said: Said, name: str) -> Said:
    """An object within the config, empty where it has none. Raises ValueError where it is something else."""
    inner = said.get(name) or {}
    if not isinstance(inner, dict):
        raise ValueError(f"its config says {name}: {inner!r}; that must be an object")
    return inner


def number(said: Said, name: str) -> Any:
    """A positive number of the config, None where it has none. Raises ValueError where it is something else."""
    value = said.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise ValueError(f"its config says {name}: {value!r}; that must be a positive number")
    return value


def read_vocabulary(shapes: Shapes, matrices: Collection[str], said: Said, given: int | None) -> dict[str, Any]:
    """The config's vocab_size and draft_size, from the names of the output matrices and what is known beside them.

    given: the target's vocabulary, from the caller. Raises ValueError where nothing says how large it is, and where
    tokens were left out but nothing says which.
    """
    rows = extent(shapes, matrices, 0) if any(name in shapes for name in matrices) else None
    mapped = extent(shapes, ["token_map"], 0) if "token_map" in shapes else None
    size = number(section(said, OWN), "vocab_size") or number(said, "vocab_size") or given
    drafted = number(section(said, OWN), "draft_size") or number(said, "truncated_vocab_size")
    if mapped is None and drafted is not None and rows == drafted < (size or rows):
        raise ValueError(f"missing: token_map, which must say what its {rows} of {size} tokens are")
    if rows is not None and (mapped is None or rows > mapped):
        return {"vocab_size": rows, "draft_size": mapped}
    if size is None:
        raise ValueError("nothing in it says how many tokens its target has; pass vocab_size=, or add it to its config")
    return {"vocab_size": size, "draft_size": None if mapped == size else mapped}


def read_origin(said: Said) -> dict[str, Any]:
    """The config's target_layers and target_name, where they are said."""
    words = section(said, OWN)
    name = words.get("target_name") or said.get("base_model_name_or_path")
    return {"target_layers": number(words, "target_layers"), "target_name": name}
