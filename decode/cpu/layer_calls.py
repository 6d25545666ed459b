"""Calls of a decoder layer as flat lists of tensors, which kernels take.

Shapes: B rows, N nodes, H key-value heads, C slots of the KV cache (attention sees the first S), D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.kv_cache import TreeCache


class CallSpec(NamedTuple):
    """What a kernel is compiled for.

    args, kwargs: each argument's type, which also tells 1, 1.0 and True apart, or a tuple of types. constants: the
    values that are neither a tensor nor the KV cache. tensors: each tensor's size, stride and dtype; if the tensor is
    contiguous with last size S, size omits S and stride is None. cache: (B, H, D) of the layer's keys and values, and
    their dtype.
    """

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    constants: tuple[int | float | str | None, ...]
    tensors: tuple[tuple[tuple[int, ...], tuple[int, ...] | None, torch.dtype], ...]
    cache: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def flatten_call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallSpec, list[Tensor]] | None:
    """The spec of a call of the layer that writes to layer `number` of a `TreeCache`, and its kernel's inputs.

    The inputs are the call's tensors, then the layer's keys and values [B, H, C, D], then the new nodes' slots [B, N].
    None if that part of the cache is empty, or if an argument is not a tensor, a plain value, a tuple or that cache.
    """
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, TreeCache)), None)
    states = None if cache is None else cache.allocated(number)
    if cache is None or states is None:
        return None
    tensors: list[Tensor] = []
    constants: list[Any] = []

    def describe(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(describe, value))
        if isinstance(value, Tensor):
            tensors.append(value)
            return Tensor
        if value is not cache:
            constants.append(value)
        return type(value)

    def describe_tensor(value: Tensor) -> tuple[Any, ...]:
        if value.dim() == 4 and value.shape[3] == cache.used and value.is_contiguous():
            return tuple(value.shape[:3]), None, value.dtype
        return tuple(value.shape), value.stride(), value.dtype

    described = describe(args), tuple((name, describe(value)) for name, value in kwargs.items())
    if not all(value is None or isinstance(value, int | float | str) for value in constants):
        return None
    keys, values = ((*part.shape[:2], part.shape[3]) for part in states)
    spec = CallSpec(*described, tuple(constants), tuple(map(describe_tensor, tensors)), (keys, values, states[0].dtype))
    return spec, [*tensors, *states, cache.node_slots]


def rebuild_call(spec: CallSpec, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments, with a `LayerCache` for the KV cache. Raises ValueError if no argument has size S."""
    *arguments, keys, values, places = tensors
    used = [tensor.shape[3] for tensor, (_, stride, _) in zip(arguments, spec.tensors, strict=True) if stride is None]
    if not used:
        raise ValueError("no argument shows how many slots of the KV cache are used")
    cache, left, constants = LayerCache(keys, values, places, used[0]), iter(arguments), iter(spec.constants)

    def rebuild(kind: Any) -> Any:
        if isinstance(kind, tuple):
            return tuple(map(rebuild, kind))
        if kind is TreeCache:
            return cache
        return next(left if kind is Tensor else constants)

    return rebuild(spec.args), {name: rebuild(kind) for name, kind in spec.kwargs}


@dataclass
class LayerCache:
    """A kernel's view of the KV cache: a layer's keys and values [B, H, C, D], its nodes' slots [B, N], and S."""

    keys: Tensor
    values: Tensor
    places: Tensor
    used: int

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `TreeCacheLayer.update`, but writes to the whole tensors: a compiler would copy slices of them."""
        row = torch.arange(self.places.shape[0])[:, None]
        self.keys[row, :, self.places] = key_states.transpose(1, 2)
        self.values[row, :, self.places] = value_states.transpose(1, 2)
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]
