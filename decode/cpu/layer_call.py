"""A call of a decoder layer as a flat list of tensors, which a kernel takes.

Shapes: B rows, N nodes, H key-value heads, C slots of the KV cache (attention sees the first S), D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.kv_cache import TreeCache


class LayerCall(NamedTuple):
    """A call's structure, its sizes (B, N, S), and its tensors.

    form: what must be equal for two calls to run the same kernel, sizes aside. Each argument's type, which also tells
    1, 1.0 and True apart, or a tuple of types; the values that are neither tensors nor the KV cache; and each tensor's
    dtype. tensors: the call's, states [B, N, ...] first, then the layer's keys and values [B, H, C, D], then the new
    nodes' slots [B, N].
    """

    form: tuple[Any, ...]
    sizes: tuple[int, int, int]
    tensors: list[Tensor]


def flatten_call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall | None:
    """A call of the layer that writes to layer `number` of a `TreeCache`.

    None if that part of the cache is empty, or if an argument is not a tensor, a plain value, a tuple or that cache.
    """
    cache = next((value for value in (*kwargs.values(), *args) if isinstance(value, TreeCache)), None)
    states = None if cache is None else cache.allocated(number)
    if cache is None or states is None:
        return None
    tensors: list[Tensor] = []
    constants: list[Any] = []

    def describe(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value if value.is_contiguous() else value.contiguous())
            return value.dtype
        if isinstance(value, tuple):
            return tuple(map(describe, value))
        if value is not cache:
            constants.append(value)
        return type(value)

    form = tuple(map(describe, args)), tuple((name, describe(value)) for name, value in kwargs.items())
    if not tensors or tensors[0].dim() < 2 or not all(_is_plain(value) for value in constants):
        return None
    sizes = tensors[0].shape[0], tensors[0].shape[1], cache.used
    return LayerCall((*form, tuple(constants)), sizes, [*tensors, *states, cache.node_slots])


def rebuild_call(form: tuple[Any, ...], used: int, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a flattened call, with a `LayerCache` of `used` slots for the KV cache."""
    *arguments, keys, values, slots = tensors
    args, kwargs, constants = form
    cache, left, constants = LayerCache(keys, values, slots, used), iter(arguments), iter(constants)

    def rebuild(kind: Any) -> Any:
        if isinstance(kind, tuple):
            return tuple(map(rebuild, kind))
        if kind is TreeCache:
            return cache
        return next(left if isinstance(kind, torch.dtype) else constants)

    return rebuild(args), {name: rebuild(kind) for name, kind in kwargs}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str)


@dataclass
class LayerCache:
    """A kernel's view of the KV cache: a layer's keys and values [B, H, C, D], its nodes' slots [B, N], and S."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    used: int

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `TreeCacheLayer.update`, but writes to the whole tensors: a compiler would copy slices of them."""
        row = torch.arange(self.slots.shape[0])[:, None]
        self.keys[row, :, self.slots] = key_states.transpose(1, 2)
        self.values[row, :, self.slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]
