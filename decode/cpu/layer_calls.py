"""Calls of a decoder layer as flat lists of tensors, which kernels take.

Shapes: B rows, N nodes, H key-value heads, C slots of the KV cache, the first S of which attention sees, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.kv_cache import TreeCache

CallSpec = tuple[tuple[int | str, Any], ...]  # the place or name of each argument, and a spec of its value


class TensorSpec(NamedTuple):
    """A tensor's size, stride and dtype. If it is contiguous with last size S, size omits S and stride is None."""

    size: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype


class ConstantSpec(NamedTuple):
    """A value that is not a tensor. The type tells 1, 1.0 and True apart."""

    kind: type
    value: int | float | str | None


class CacheSpec(NamedTuple):
    """The KV cache: (B, H, D) of a layer's keys and of its values, and their dtype."""

    keys: tuple[int, int, int]
    values: tuple[int, int, int]
    dtype: torch.dtype


class LayerCall(NamedTuple):
    """A call of a decoder layer: the spec that its kernel is compiled for, and the kernel's inputs.

    The inputs are the call's tensors, then the layer's keys and values [B, H, C, D], then the new nodes' slots [B, N].
    """

    spec: CallSpec
    tensors: list[Tensor]


def flatten_call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall | None:
    """The call of the layer that writes to layer `number` of a `TreeCache`.

    None if that part of the cache is empty, or if an argument is not a tensor, a plain value, a tuple or that cache.
    """
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, TreeCache)), None)
    states = None if cache is None else cache.allocated(number)
    if cache is None or states is None:
        return None
    tensors: list[Tensor] = []

    def describe(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            if value.dim() == 4 and value.shape[3] == cache.used and value.is_contiguous():
                return TensorSpec(tuple(value.shape[:3]), None, value.dtype)
            return TensorSpec(tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, tuple):
            return tuple(map(describe, value))
        if value is cache:
            keys, values = ((part.shape[0], part.shape[1], part.shape[3]) for part in states)
            return CacheSpec(keys, values, states[0].dtype)
        if value is None or isinstance(value, int | float | str):
            return ConstantSpec(type(value), value)
        raise TypeError(f"a kernel cannot take {type(value).__name__}")

    try:
        arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        spec = tuple((name, describe(value)) for name, value in arguments)
    except TypeError:
        return None
    return LayerCall(spec, [*tensors, *states, cache.node_slots])


def dynamic_dimensions(spec: CallSpec) -> list[tuple[int, ...]]:
    """For each tensor of a call, the dimensions of size S or C."""
    return [*[(3,) if tensor.stride is None else () for tensor in _tensor_specs(spec)], (2,), (2,), ()]


def rebuild_call(spec: CallSpec, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments, with a `LayerCache` for the KV cache. Raises ValueError if no argument has size S."""
    *arguments, keys, values, places = tensors
    pairs = zip(arguments, _tensor_specs(spec), strict=True)
    used = next((tensor.shape[3] for tensor, like in pairs if like.stride is None), None)
    if used is None:
        raise ValueError("no argument shows how many slots of the KV cache are used")
    cache, left = LayerCache(keys, values, places, used), iter(arguments)

    def rebuild(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return next(left)
        if isinstance(value, CacheSpec):
            return cache
        return value.value if isinstance(value, ConstantSpec) else tuple(map(rebuild, value))

    rebuilt = [(name, rebuild(value)) for name, value in spec]
    args = tuple(value for name, value in rebuilt if isinstance(name, int))
    return args, {name: value for name, value in rebuilt if isinstance(name, str)}


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


def _tensor_specs(spec: Any) -> Iterator[TensorSpec]:
    """The tensors of a spec, in the order of the call."""
    if isinstance(spec, TensorSpec):
        yield spec
    elif type(spec) is tuple:
        for part in spec:
            yield from _tensor_specs(part)
