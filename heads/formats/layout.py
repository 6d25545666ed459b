"""How a file names a head's tensors, and how shapes and config give the head's sizes.

Sizes that tensor names or shapes show are never taken from the config, because published configs get them wrong.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Layout:
    """A head as one file stores it."""

    config: HeadConfig
    names: dict[str, str]  # the file's name of each tensor that the head needs -> our name
    ignored: Set[str] = frozenset()  # other tensors that the file can have

    @classmethod
    def of(cls, config: HeadConfig, renamed: Mapping[str, str] = {}, ignored: Set[str] = frozenset()) -> Layout:
        """The layout of a file whose names are ours except for some prefixes: `renamed` maps ours to the file's."""
        return cls(config, {replace_prefix(ours, renamed): ours for ours in build_empty(config).state_dict()}, ignored)


def build_empty(config: HeadConfig) -> Head:
    """A head with this config on the meta device: parameters with shapes but no storage."""
    head_class: Any = next(head for head, kind in HEADS.values() if isinstance(config, kind))
    with torch.device("meta"):
        return head_class(config)


def replace_prefix(name: str, replaced: Mapping[str, str]) -> str:
    """The name with the first of these prefixes that it has replaced, if any."""
    prefix = next((prefix for prefix in replaced if name.startswith(prefix)), "")
    return replaced.get(prefix, "") + name.removeprefix(prefix)


def count(form: str, names: Iterable[str]) -> tuple[int, ...]:
    """For each {} of a form such as "blocks.{}.layers.{}.weight", 1 + its highest number; () if no name matches."""
    pattern = re.compile(re.escape(form).replace(r"\{\}", r"(\d+)"))
    found = [match.groups() for match in map(pattern.fullmatch, names) if match]
    return tuple(1 + max(map(int, column)) for column in zip(*found, strict=True))


def extent(shapes: Shapes, names: Iterable[str], axis: int, otherwise: int = 1) -> int:
    """The size of this axis in the first of these tensors that has it. Missing tensors are reported later."""
    return next((shapes[name][axis] for name in names if axis < len(shapes.get(name, ()))), otherwise)


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


def read_vocab_size(config: ConfigDict, given: int | None) -> int:
    """The target's vocabulary size from the config, else `given`. Raises ValueError if both lack it."""
    size = number(section(config, OWN), "vocab_size") or number(config, "vocab_size") or given
    if size is None:
        raise ValueError("it does not contain the target's vocabulary size; pass vocab_size=, or add it to its config")
    return int(size)


def read_target(config: ConfigDict) -> dict[str, Any]:
    """What the config has of the target: its layers, name, weights and longest context, None if missing."""
    own, verifier = section(config, OWN), section(section(config, "speculators_config"), "verifier")
    return {
        "target_layers": number(own, "target_layers"),
        "target_name": own.get("target_name") or config.get("base_model_name_or_path") or verifier.get("name_or_path"),
        "target_weights": own.get("target_weights"),
        "max_position_embeddings": number(own, "max_position_embeddings"),
    }


def read_common(shapes: Shapes, matrices: Collection[str], config: ConfigDict, given: int | None) -> dict[str, Any]:
    """`HeadConfig`'s entries except hidden_size, for a Medusa or Hydra head with these output matrices.

    Raises ValueError if the target's vocabulary size is needed and unknown, or if a draft vocabulary has no token map.
    """
    rows = extent(shapes, matrices, 0, 0)
    mapped = extent(shapes, [MAP], 0) if MAP in shapes else None
    size = rows if rows > (mapped or 0) else read_vocab_size(config, given)
    drafted = number(section(config, OWN), "draft_size") or number(config, "truncated_vocab_size")
    if mapped is None and rows == drafted and rows < (whole := read_vocab_size(config, given or rows)):
        raise ValueError(f"missing: token_map, which must list its {rows} of {whole} tokens")
    return {"vocab_size": size, "draft_size": None if mapped == size else mapped, **read_target(config)}
