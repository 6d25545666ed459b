"""A head's folder as an engine reads it, and findings about it.

Engines read `config.json` and the tensors. Draftless also keeps a copy of the config in the metadata of the weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import LlamaConfig

from heads.formats.eagle import LAYER
from heads.formats.eagle3 import MIDLAYER, NESTED
from heads.formats.layout import OWN, count, extent, number, section
from heads.formats.medusa import BLOCKS, PREFIXES
from heads.formats.weight_files import CONFIG, read_json, read_weights

Engine = Literal["vllm", "sglang", "both", "draftless"]
NUMBERED = re.compile(r"layers\.(\d+)\.")
HYDRA = ("grounded.{}.linear.weight", "hydra_mlp.{}.{}.linear.weight")
MEDUSA = [f"{prefix}{block}.weight" for prefix in PREFIXES for block in BLOCKS]


@dataclass(frozen=True)
class Finding:
    """One fact about a folder. An error means that the engine cannot serve the head as it was trained."""

    level: Literal["error", "warning", "note"]
    engine: Engine  # "both": vLLM and SGLang; "draftless": loading and drafting here
    name: str  # stable, so that programs can look for it
    text: str  # what is wrong and what to do, in one line


error, warning, note = (partial(Finding, level) for level in ("error", "warning", "note"))


@dataclass(frozen=True)
class HeadFolder:
    """The content of a head's folder."""

    path: Path
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]  # config.json
    metadata: Mapping[str, Any]  # the copy of the config in weights that Draftless wrote; else empty

    @cached_property
    def layer_config(self) -> Mapping[str, Any]:
        """The config of the head's decoder layer: nested in speculators' format, else flat."""
        return {**self.config, **section(self.config, NESTED)}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @cached_property
    def kind(self) -> str | None:
        """The method, by the names of the tensors; None if they are not a known head's."""
        if self.prefix == MIDLAYER or f"{LAYER}hidden_norm.weight" in self.tensors:
            return "eagle3"
        if "fc.weight" in self.tensors and any(name.startswith(f"{LAYER}self_attn.") for name in self.tensors):
            return "eagle"
        if any(count(form, self.tensors) for form in HYDRA):
            return "hydra"
        return "medusa" if any(count(form, self.tensors) for form in MEDUSA) else None

    @property
    def is_speculators(self) -> bool:
        """Whether it is in the format of vLLM's speculators."""
        return NESTED in self.config or "speculators_model_type" in self.config

    @cached_property
    def prefix(self) -> str:
        """The prefix of the names of an EAGLE head's first layer."""
        return MIDLAYER if any(name.startswith(MIDLAYER) for name in self.tensors) else LAYER

    @cached_property
    def layers(self) -> set[int]:
        """The numbers of the decoder layers in the file."""
        numbered = {int(match[1]) for match in map(NUMBERED.match, self.tensors) if match}
        return numbered | ({0} if self.prefix == MIDLAYER else set())

    @property
    def architectures(self) -> list[str]:
        names = self.config.get("architectures") or []
        return [str(name) for name in names] if isinstance(names, list) else [str(names)]

    def rows(self, name: str) -> int | None:
        """The number of rows of a tensor; None if the file does not have it."""
        return extent(self.shapes, [name], 0) if name in self.shapes else None

    def read_size(self, name: str) -> int:
        """A size of the layer, with transformers' default. Raises ValueError if it is not a positive number."""
        return int(number(self.layer_config, name) or getattr(LlamaConfig(), name))


def read_folder(path: Path) -> HeadFolder:
    """Read a folder. Raises ValueError if a file is missing, damaged or cut short."""
    tensors, metadata = read_weights(path)
    config = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    own = json.loads(metadata.get(OWN, "{}"))
    return HeadFolder(path, tensors, config, own if isinstance(own, dict) else {})
