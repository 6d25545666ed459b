"""Load a draft model: any model, or one that was trained to draft (`draftless train`)."""

from __future__ import annotations

import json
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decode import Target
from decode.models.loading import load_model

CONFIG = "config.json"


def load_draft_model(
    name: str | PathLike[str] | None = None, *, whole: bool = False, accelerate: str = "auto", **settings: Any
) -> Target:
    """A model to draft with.

    whole: with the logits of all tokens, as a target has them. Else a model in a local folder that was trained to draft
    a part of the vocabulary computes no others. Other arguments and errors are those of `Target.load`.
    """
    tokens = None if name is None or whole else read_draft_tokens(Path(name))
    deterministic = settings.pop("deterministic", False)
    if tokens is None:
        return Target.load(name, accelerate=accelerate, deterministic=deterministic, **settings)
    model, tokenizer = load_model(name, **settings)
    keep_outputs(model, torch.tensor(tokens))
    target = Target(model, tokenizer, accelerate=accelerate, deterministic=deterministic, in_place=True)
    target.output_tokens = torch.tensor(tokens)
    return target


def read_draft_tokens(folder: Path) -> list[int] | None:
    """The tokens that a model in a folder was trained to draft; None: all. Raises ValueError for a damaged list."""
    config = _read_config(folder)
    config |= text if isinstance(text := config.get("text_config"), dict) else {}
    if (tokens := config.get("draft_tokens")) is None:
        return None
    size = config.get("vocab_size")
    is_list = isinstance(tokens, list) and bool(tokens) and all(type(token) is int for token in tokens)
    if not is_list or tokens != sorted({*tokens}) or not 0 <= tokens[0] <= tokens[-1] < (size or 1 << 31):
        raise ValueError(f"{folder / CONFIG}: draft_tokens is a list of token ids below {size}, each once and in order")
    return [*tokens]


def is_trained_draft(folder: Path) -> bool:
    """Whether a folder holds a draft model that `draftless train` has saved."""
    return "target_weights" in _read_config(folder)


def _read_config(folder: Path) -> dict[str, Any]:
    """A folder's config; empty if there is none, or a damaged one, about which loading it says more."""
    with suppress(OSError, ValueError):
        config = json.loads((folder / CONFIG).read_bytes())
        return config if isinstance(config, dict) else {}
    return {}


def keep_outputs(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """Replace a model's output layer by one for these tokens alone."""
    output: Any = model.get_output_embeddings()
    weight, bias = output.weight.detach()[tokens], getattr(output, "bias", None)
    smaller = nn.Linear(weight.shape[1], len(tokens), bias=bias is not None, device="meta")
    smaller.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        smaller.bias = nn.Parameter(bias.detach()[tokens], requires_grad=False)
    model.set_output_embeddings(smaller.train(output.training))
    model.config.get_text_config(decoder=True).tie_word_embeddings = model.config.tie_word_embeddings = False
