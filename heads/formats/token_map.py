"""Token maps: every published form of a draft vocabulary, as one ascending list of the target's token ids.

Shapes: V the target's vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heads.formats.layout import MAP


def read_token_map(tensors: Mapping[str, Tensor], listed: Any) -> dict[str, Tensor]:
    """The tensors with a `token_map` [D], from EAGLE-3's `d2t` or `t2d`, or as listed in our section of the config.

    d2t [D] holds offsets: draft token i is the target's token i + d2t[i]. t2d [V] is true for the target's tokens in
    the draft vocabulary; it stays, because its length is V. Raises ValueError if they are malformed or differ.
    """
    found = dict(tensors)
    if listed is not None:
        if not isinstance(listed, list) or not all(type(token) is int for token in listed):
            raise ValueError(f"its config's {MAP} must be a list of tokens")
        found[MAP] = torch.tensor(listed)
    marked = found["t2d"].flatten().nonzero().flatten() if "t2d" in found else None
    if (offsets := found.pop("d2t", None)) is not None:
        if offsets.ndim != 1 or offsets.is_floating_point():
            raise ValueError(f"its d2t is {list(offsets.shape)} of {offsets.dtype}; it must be a list of offsets")
        found[MAP] = offsets.long() + torch.arange(len(offsets))
        if marked is not None and not torch.equal(found[MAP].sort().values, marked):
            raise ValueError("its d2t and t2d are of different tokens; i + d2t[i] must be the tokens that t2d marks")
    elif marked is not None:
        found[MAP] = marked
    return found


def sort_vocabulary(states: dict[str, Any], vocab_size: int) -> None:
    """Sort the token map, and the rows of the output matrices with it, in place. A map of all tokens is dropped.

    Raises ValueError if the map is not a list of different tokens.
    """
    tokens = states.pop(MAP)
    valid = tokens.ndim == 1 and not tokens.is_floating_point() and tokens.unique().numel() == tokens.numel() > 0
    if not valid or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"its token_map must be a list of different tokens, each below {vocab_size}")
    tokens, order = tokens.long().sort()
    for name, rows in states.items():
        if name.startswith("lm_head") and rows.shape[:1] == tokens.shape:
            states[name] = rows[order]
    if len(tokens) < vocab_size:
        states[MAP] = tokens
