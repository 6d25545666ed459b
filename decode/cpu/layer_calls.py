"""What a decoder layer is called with: taken apart into tensors and a form, and put together again.

Shapes: B rows, N nodes, H key-value heads, C slots of the KV cache, of which attention sees the first S, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.kv_cache import TreeCache

Form = tuple[tuple[int | str, Any], ...]  # of each argument its place or name, and what stands for its value


class Like(NamedTuple):
    """Stands for a tensor; `stride` is None for one that has S as its last size, and no gaps."""

    size: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype


class Constant(NamedTuple):
    """Stands for a value that is no tensor."""

    kind: type
    value: int | float | str | None


class Cached(NamedTuple):
    """Stands for the KV cache: the sizes of a layer's keys and values but for C, and their dtype."""

    keys: tuple[int, int, int]
    values: tuple[int, int, int]
    dtype: torch.dtype


class LayerCall(NamedTuple):
    """A call of a decoder layer.

    A kernel is made for a `form` and takes `tensors`: those of the call, then the layer's keys and values [B, H, C, D],
    and the new nodes' slots [B, N].
    """

    form: Form
    tensors: list[Tensor]


def take_apart(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall | None:
    """The call of the layer that writes to layer `number` of a `TreeCache`.

    None before anything was written there, and where the call holds other things than tensors, plain values and that
    cache.
    """
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, TreeCache)), None)
    states = None if cache is None else cache.allocated(number)
    if cache is None or states is None:
        return None
    tensors: list[Tensor] = []

    def stand_in(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            if value.dim() == 4 and value.shape[3] == cache.used and value.is_contiguous():
                return Like(tuple(value.shape[:3]), None, value.dtype)
            return Like(tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, tuple):
            return tuple(map(stand_in, value))
        if value is cache:
            keys, values = ((part.shape[0], part.shape[1], part.shape[3]) for part in states)
            return Cached(keys, values, states[0].dtype)
        if value is None or isinstance(value, int | float | str):
            return Constant(type(value), value)
        raise TypeError(f"a kernel cannot take {type(value).__name__}")

    try:
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        form = tuple((name, stand_in(value)) for name, value in named)
    except TypeError:
        return None
    return LayerCall(form, [*tensors, *states, cache.node_slots])


def free_sizes(form: Form) -> list[tuple[int, ...]]:
    """Of each tensor of a call the dimensions whose size may be another: S and C."""
    return [*[(3,) if like.stride is None else () for like in _likes(form)], (2,), (2,), ()]


def put_together(form: Form, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments, with a `CachePart` for the KV cache. Raises ValueError where none of them has size S."""
    *given, keys, values, places = tensors
    used = [tensor.shape[3] for tensor, like in zip(given, _likes(form), strict=True) if like.stride is None]
    if not used:
        raise ValueError("no argument says how many slots of the KV cache are used")
    part = CachePart(keys, values, places, used[0])
    left = iter(given)

    def value_of(stands: Any) -> Any:
        if isinstance(stands, Like):
            return next(left)
        if isinstance(stands, Cached):
            return part
        return stands.value if isinstance(stands, Constant) else tuple(map(value_of, stands))

    named = [(name, value_of(stands)) for name, stands in form]
    args = tuple(value for name, value in named if isinstance(name, int))
    return args, {name: value for name, value in named if isinstance(name, str)}


@dataclass
class CachePart:
    """What a kernel has for the KV cache: a layer's keys and values [B, H, C, D], its nodes' slots [B, N], and S."""

    keys: Tensor
    values: Tensor
    places: Tensor
    used: int

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What `TreeCacheLayer.update` does. It writes to all slots: of those used a compiler would make copies."""
        row = torch.arange(self.places.shape[0])[:, None]
        self.keys[row, :, self.places] = key_states.transpose(1, 2)
        self.values[row, :, self.places] = value_states.transpose(1, 2)
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]


def _likes(stands: Any) -> Iterator[Like]:
    """What stands for tensors, in the order of the call."""
    if isinstance(stands, Like):
        yield stands
    elif type(stands) is tuple:
        for part in stands:
            yield from _likes(part)
