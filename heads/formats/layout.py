"""How a file names a head's tensors, and how shapes and config give the head's sizes.

Sizes that tensor names or shapes show are never taken from the config, because published configs get them wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from heads.eagle import EagleConfig, EagleHead
from heads.eagle3 import Eagle3Config, Eagle3Head
from heads.hydra import HydraConfig, HydraHead
from heads.medusa import MedusaConfig, MedusaHead
from heads.vocabulary import HeadConfig

Shapes = Mapping[str, Sequence[int]]  # of a file's tensors, by name
ConfigDict = Mapping[str, Any]  # the content of config.json
Head: TypeAlias = MedusaHead | HydraHead | EagleHead | Eagle3Head

HEADS = {
    "medusa": (MedusaHead, MedusaConfig),
    "hydra": (HydraHead, HydraConfig),
    "eagle": (EagleHead, EagleConfig),
    "eagle3": (Eagle3Head, Eagle3Config),
}
OWN = "draftless"  # our section of config.json, and our key in the weights' metadata
MAP = "token_map"
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Layout:
    """A head as one file stores it."""

    config: HeadConfig
    renamed: Mapping[str, str] = field(default_factory=dict)  # prefixes of our names -> the file's, where they differ
    ignored: Set[str] = frozenset()  # tensors that the file can have and the head does not need


def build_empty(config: HeadConfig) -> Head:
    """A head with this config on the meta device: parameters with shapes but no storage."""
    head_class: Any = next(head for head, kind in HEADS.values() if isinstance(config, kind))
    with torch.device("meta"):
        return head_class(config)


def replace_prefix(name: str, replaced: Mapping[str, str]) -> str:
    """The name with the first of these prefixes that it has replaced, if any."""
    prefix = next((prefix for prefix in replaced if name.startswith(prefix)), "")
    return replaced.get(prefix, "") + name.removeprefix(prefix)


def rename(shapes: Shapes, renamed: Mapping[str, str]) -> Shapes:
    """The shapes by our names. renamed: as in `Layout`."""
    ours = {file: prefix for prefix, file in renamed.items()}
    return {replace_prefix(name, ours): shape for name, shape in shapes.items()}


def count(form: str, names: Iterable[str]) -> tuple[int, ...]:
    """For each {} of a form such as "blocks.{}.layers.{}.weight", 1 + its highest number; () if no name matches."""
    found = [match.groups() for match in map(_compile(form).fullmatch, names) if match]
    return tuple(1 + max(map(int, column)) for column in zip(*found, strict=True))


def extent(shapes: Shapes, forms: Iterable[str], axis: int, otherwise: int = 1) -> int:
    """The size of this axis in the first tensor that has it and a name of one of these forms.

    Missing tensors are reported later.
    """
    found = (shape for form in forms for name, shape in shapes.items() if _compile(form).fullmatch(name))
    return next((shape[axis] for shape in found if axis < len(shape)), otherwise)


def _compile(form: str) -> re.Pattern[str]:
    return re.compile(re.escape(form).replace(r"\{\}", r"(\d+)"))


def section(config: ConfigDict, name: str) -> ConfigDict:
    """An object inside the config; empty if missing. Raises ValueError if it is something else."""
    inner = config.get(name) or {}
    if not isinstance(inner, dict):
        raise ValueError(f"its config has {name}: {inner!r}; it must be an object")
    return inner


def number(config: ConfigDict, name: str) -> Any:
    """A positive number of the config; None if missing. Raises ValueError if it is something else."""
    value = config.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise ValueError(f"its config has {name}: {value!r}; it must be a positive number")
    return value


def read_common(
    shapes: Shapes, hidden_size: int, matrices: Iterable[str], config: ConfigDict, given: int | None
) -> dict[str, Any]:
    """`HeadConfig`'s entries for a head with output matrices of these forms. given: the target's vocabulary size.

    Raises ValueError if that is needed and unknown, or if a draft vocabulary has no token map.
    """
    rows, mapped = extent(shapes, matrices, 0, 0), extent(shapes, [MAP], 0, 0)
    shown = extent(shapes, [EMBEDDING, "t2d"], 0, 0)
    size = shown or number(config, "vocab_size") or (not mapped and rows) or given
    if not size:
        raise ValueError("it does not contain the target's vocabulary size; pass vocab_size=, or add it to its config")
    if EMBEDDING in shapes and tuple(shapes[EMBEDDING]) != (size, hidden_size):
        raise ValueError(f"wrong: {EMBEDDING} is {list(shapes[EMBEDDING])}, not {[size, hidden_size]}")
    if not mapped and rows not in (0, size):
        raise ValueError(f"missing: token_map or d2t, which must map its {rows} output rows to {size} tokens")
    verifier = section(section(config, "speculators_config"), "verifier")
    return {
        "hidden_size": hidden_size,
        "vocab_size": int(size),
        "draft_size": None if mapped in (0, size) else mapped,
        "target_name": config.get("base_model_name_or_path") or verifier.get("name_or_path"),
    }
