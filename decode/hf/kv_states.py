"""Keys and values between transformers' caches and the project's own.

Shapes: B rows, H key-value heads, S slots, D head size. A row's slots are its computed columns, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from decode.kv_cache import KVCache

READABLE = DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

# One row's keys and values [H, S, D] in each layer; None for a layer that uses another layer's.
RowStates: TypeAlias = list[tuple[Tensor, Tensor] | None]


def count_cached(cache: Cache) -> int:
    """The tokens in a cache. Raises ValueError for one that does not tell, because it has states alone."""
    layers: list[Any] = cache.layers
    if not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers):
        return int(cache.get_seq_length())
    if any(any(layer.has_previous_state.values()) for layer in layers):
        raise ValueError("a cache without attention layers does not tell how many tokens it holds; leave it out")
    return 0


def check_cache(cache: Cache, batch: int) -> None:
    """Raise ValueError if a user's cache has another batch size, or layers of another form than keys and values."""
    for layer in cache.layers:
        has_state = isinstance(layer, LinearAttentionLayer)
        if isinstance(layer, CacheLayerMixin) and type(layer) not in READABLE and not has_state:
            raise ValueError(
                f"speculate cannot honour a cache with a {type(layer).__name__}; pass a DynamicCache or a StaticCache"
            )
        if _has_states(layer) and layer.keys.shape[0] != batch:
            raise ValueError(f"the cache holds {layer.keys.shape[0]} rows; the batch has {batch}")


def read_cache(cache: Cache, past: int, row: int, first: int) -> RowStates:
    """A row's states in a user's cache of `past` columns, from the first one on. Those outside a window are zeros."""
    return [_read_layer(layer, row, first, past) if _has_states(layer) else None for layer in cache.layers]


def _has_states(layer: CacheLayerMixin) -> bool:
    """Whether a layer holds keys and values of its own. Some layers use another layer's."""
    return isinstance(getattr(layer, "keys", None), Tensor)


def _read_layer(layer: DynamicLayer | StaticLayer, row: int, first: int, past: int) -> tuple[Tensor, Tensor]:
    held = [states[row, :, :past] for states in (layer.keys, layer.values)]
    keys, values = (pad(states, (0, 0, past - states.shape[1], 0))[:, first:] for states in held)
    return keys, values


def write_cache(cache: Cache, rows: Sequence[RowStates], past: int, columns: int) -> None:
    """Add the columns from `past` to `columns` to a transformers cache. Dropped columns become zeros."""
    for number, layer in enumerate(zip(*rows, strict=True)):
        if layer[0] is not None:
            both = zip(*(states for states in layer if states is not None), strict=True)
            keys, values = (
                torch.stack([pad(states, (0, 0, columns - states.shape[1], 0)) for states in part]) for part in both
            )
            cache.update(keys[:, :, past:], values[:, :, past:], number)


def read_row(cache: KVCache, row: int) -> RowStates:
    """A copy of a row's committed states."""
    slots = slice(0, cache.lengths[row])
    return [
        (layer.keys[row, :, slots].clone(), layer.values[row, :, slots].clone()) if layer.is_initialized else None
        for layer in cache.layers
    ]


def load_rows(cache: KVCache, rows: Sequence[RowStates], lengths: Sequence[int], device: torch.device) -> None:
    """Fill an empty cache with the first `lengths[b]` states of each row."""
    count = max(lengths)
    if count == 0:
        return
    cache.reserve(0, count, device)
    for number, layer in enumerate(zip(*rows, strict=True)):
        if layer[0] is not None:
            both = zip(*(states for states in layer if states is not None), strict=True)
            keys, values = (_stack_rows(part, lengths) for part in both)
            cache.update(keys, values, number)
    cache.commit(lengths)


def _stack_rows(states: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """[B, H, S, D], padded at the end."""
    cut = [each[:, :length].transpose(0, 1) for each, length in zip(states, lengths, strict=True)]
    return pad_sequence(cut, batch_first=True).transpose(1, 2)
