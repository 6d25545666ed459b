"""Keys and values between transformers' caches and the project's own.

Shapes: B rows, H key-value heads, S slots, D head size. A row's slots are its computed columns, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def _has_states(layer: CacheLayerMixin) -> bool:
    """Whether a layer holds keys and values of its own. Some layers use another layer's."""
    return isinstance(getattr(layer, "keys", None), Tensor)


def read_layers(cache: Cache, past: int) -> list[tuple[Tensor, Tensor] | None]:
    """Keys and values [B, H, past, D] of each layer of a user's cache. Columns that have left a window are zeros."""
    return [
        (_fill(layer.keys[:, :, :past], past), _fill(layer.values[:, :, :past], past)) if _has_states(layer) else None
        for layer in cache.layers
    ]


def load_cache(cache: KVCache, users: Cache, past: int, rows: Sequence[int], first: Sequence[int]) -> None:
    """Fill an empty cache with rows of a user's cache of `past` columns, each from its `first` column on."""
    lengths = [max(past - begin, 0) for begin in first]
    if max(lengths) == 0:
        return
    layers = read_layers(users, past)
    cache.reserve(0, max(lengths), next(keys.device for keys, _ in filter(None, layers)))
    for number, both in enumerate(layers):
        if both is not None:
            cut = [
                [states[row, :, past - length :].transpose(0, 1) for row, length in zip(rows, lengths, strict=True)]
                for states in both
            ]
            keys, values = (pad_sequence(states).permute(1, 2, 0, 3) for states in cut)  # [B, H, S, D]
            cache.update(keys, values, number)
    cache.commit(lengths)


def write_cache(users: Cache, rows: Sequence[KVCache], past: int, columns: int) -> None:
    """Add the columns from `past` to `columns` of caches of one row to a user's. Dropped columns become zeros."""
    for number, layer in enumerate(rows[0].layers):
        if layer.is_initialized:
            keys, values = (
                torch.cat([_fill(getattr(row.layers[number], name)[:, :, : row.lengths[0]], columns) for row in rows])
                for name in ("keys", "values")
            )
            users.update(keys[:, :, past:], values[:, :, past:], number)


def _fill(states: Tensor, columns: int) -> Tensor:
    """States [B, H, S, D] as [B, H, columns, D], with zeros before them."""
    return pad(states, (0, 0, columns - states.shape[2], 0))
