"""A head from a file's tensors and their layout, strictly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heads.formats.layout import MAP, Head, Layout, build_empty, replace_prefix


def assemble(layout: Layout, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Head:
    """The head. Raises ValueError with the file's names of tensors that are missing, unexpected or wrong."""
    head = build_empty(layout.config)
    expected = {name: list(state.shape) for name, state in head.state_dict().items()}
    names = {ours: replace_prefix(ours, layout.renamed) for ours in [*expected, MAP]}  # our names -> the file's
    states = {ours: tensors[name] for ours, name in names.items() if name in tensors}
    if MAP in states:
        _sort_vocabulary(states, layout.config.vocab_size)
    wrong = []
    for ours, state in states.items():
        if list(state.shape) != expected[ours]:
            wrong.append(f"{names[ours]} is {list(state.shape)}, not {expected[ours]}")
        elif not state.is_floating_point() and ours != MAP:
            wrong.append(f"{names[ours]} is of {state.dtype}, not of a floating-point type")
    known = {*names.values(), *layout.ignored}
    faults = {
        "missing": [names[ours] for ours in expected if ours not in states],
        "unexpected": [name for name in tensors if name not in known],
        "wrong": wrong,
    }
    if found := [f"{fault}: {list_names(named)}" for fault, named in faults.items() if named]:
        raise ValueError("; ".join(found))
    dtype = dtype or next(state.dtype for state in states.values() if state.is_floating_point())
    states = {ours: convert(state, dtype, copy=True) for ours, state in states.items()}  # out of the mapped file
    if bad := [names[ours] for ours, state in states.items() if not bool(state.isfinite().all())]:
        raise ValueError(f"values are NaN or infinite in {str(dtype).removeprefix('torch.')}: {list_names(bad)}")
    head.load_state_dict(states, assign=True)
    return head


def list_names(names: Sequence[str]) -> str:
    """The first four names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def convert(tensor: Tensor, dtype: torch.dtype | None, copy: bool = False) -> Tensor:
    """The tensor as contiguous memory in this dtype; integers keep theirs."""
    dtype = dtype if tensor.is_floating_point() else None
    return tensor.detach().to(dtype or tensor.dtype, copy=copy, memory_format=torch.contiguous_format)


def _sort_vocabulary(states: dict[str, Any], vocab_size: int) -> None:
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
