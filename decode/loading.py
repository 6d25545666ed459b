"""Loading a target by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from decode.default_model import default_model
from decode.prepare import prepare as prepare_model
from decode.text import Tokenizer

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name: str | Path | None = None,
    *,
    dtype: str | None = None,
    device: str | None = None,
    device_map: str | None = None,
    prepare: bool = True,
) -> tuple[PreTrainedModel, Tokenizer]:
    """Load a model and its tokenizer from a local folder or a hub id; without a name, the default model.

    dtype: one of `DTYPES`; None keeps the checkpoint's, or float32 on a CPU. device: e.g. "cuda:0"; None takes a GPU
    where there is one. device_map: accelerate's, e.g. "auto", instead of a device. prepare: pack linear layers for
    speed where they lie on a CPU. Raises ValueError for an unknown dtype or device, and where the name leads nowhere.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    place = _device(device)
    folder = str(name) if name is not None else str(default_model())
    if dtype is None:
        chosen = torch.float32 if place.type == "cpu" and device_map is None else "auto"
    else:
        chosen = DTYPES[dtype]
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=chosen, device_map=device_map)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"cannot load a model from {folder!r}: {reason}") from error
    if device_map is None:
        model = model.to(place)
    return prepare_model(model) if prepare else model, tokenizer


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The same model cut to its first `count` layers; it shares every weight. A poor draft, but one that always fits.

    Raises ValueError where the model has fewer layers.
    """
    cut = _share(model)
    base = _share(getattr(model, model.base_model_prefix))
    name = next(name for name in ("layers", "h", "blocks") if hasattr(base, name))
    layers = getattr(base, name)
    if not 1 <= count <= len(layers):
        raise ValueError(f"cannot cut a model of {len(layers)} layers to {count}")
    setattr(base, name, layers[:count])
    setattr(cut, model.base_model_prefix, base)
    cut.config = base.config = copy.deepcopy(model.config)
    cut.config.num_hidden_layers = count
    if getattr(cut.config, "layer_types", None):
        cut.config.layer_types = cut.config.layer_types[:count]
    return cut


def _share(module: Any) -> Any:
    """A copy of one module whose parts can be replaced without changing the original's; they are not copied."""
    shared = copy.copy(module)
    shared._modules = dict(module._modules)
    return shared


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}; examples are cpu, cuda and cuda:1") from None
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; use cpu or cuda")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there; torch sees {torch.cuda.device_count()} CUDA devices")
    return place
