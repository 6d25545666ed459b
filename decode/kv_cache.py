"""The KV cache for verifying trees: preallocated, compacted in place, with its own length for each row.

Shapes: B rows, H key-value heads, S slots, N nodes, T path nodes, D head size. The slot of a committed token is
its position. The nodes being verified follow: node i of row b is in slot lengths[b] + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from decode.gpu.transfer import copy_packed

BUCKET = 64  # the number of used slots is rounded up to this, so that attention sees few different shapes
GROWTH = 256  # allocations are rounded up to this


class TreeCache(Cache):
    """A transformers `Cache` whose layers write to the slots that `reserve` chose. Attention sees the used slots."""

    def __init__(self, batch: int) -> None:
        # A reference cycle would keep the memory of an unused cache until the garbage collector runs.
        cache: Any = proxy(self)
        self._make_layer = partial(TreeCacheLayer, cache)
        super().__init__(layer_class_to_replicate=self._make_layer)
        self.lengths = [0] * batch  # committed tokens of each row, on the host
        self.capacity = 0  # slots that are allocated
        self.used = 0  # slots that attention sees
        self.node_slots = torch.empty(batch, 0, dtype=torch.long)  # [B, N]
        self.slots: slice | Tensor = slice(0, 0)  # the same, as a slice if all rows are equally long

    def reserve(
        self, start: int, count: int, device: torch.device, lengths: Tensor | None = None, exact: bool = False
    ) -> Tensor:
        """Make room for nodes start..start+count-1 of each row. Returns the lengths as a tensor [B].

        lengths: that tensor, if it is on the device already. exact: attention sees no slot beyond the nodes.
        """
        longest = max(self.lengths)
        end = longest + start + count
        self.used = -(-end // BUCKET) * BUCKET
        self.capacity = self._choose_capacity(self.used)
        self.used = end if exact else self.used
        lengths = torch.tensor(self.lengths).to(device) if lengths is None else lengths
        self.node_slots = lengths[:, None] + torch.arange(start, start + count, device=device)
        self.slots = slice(longest + start, end) if min(self.lengths) == longest else self.node_slots
        return lengths

    def keep(self, path: Tensor, counts: Sequence[int]) -> None:
        """Commit the first counts[b] nodes of each row's path, and forget the others. See `plan_moves` for the path."""
        moves = self.plan_moves(path)
        if moves is not None:
            self.move(moves)
        self.commit(counts)

    def plan_moves(self, path: Tensor) -> Tensor | None:
        """The slots [2, B, T] that each path's nodes are in and those they go to; None if all are in place.

        path [B, T], on the CPU; padding holds its own column index, so nothing moves there.
        """
        column = torch.arange(path.shape[1])
        if not bool((path != column).any()):  # a chain is in place already
            return None
        starts = torch.tensor(self.lengths)[:, None]
        return torch.stack([starts + path, starts + column])

    def move(self, moves: Tensor) -> None:
        """Copy slots as planned, in all layers."""
        on_device: dict[torch.device, Tensor] = {}
        for layer in self.layers:
            if layer.is_initialized:  # layers that share another layer's keys have none of their own
                if layer.device not in on_device:
                    on_device[layer.device] = moves.to(layer.device)
                layer.move(*on_device[layer.device])

    def commit(self, counts: Sequence[int]) -> None:
        """Count each row's first counts[b] nodes, which are in place, as committed."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def allocated(self, number: int) -> tuple[Tensor, Tensor] | None:
        """A layer's keys and values in all slots; None before its first write."""
        layer = self.layers[number] if number < len(self.layers) else None
        return layer.allocated() if layer is not None and layer.is_initialized else None

    def crop(self, lengths: Sequence[int]) -> None:
        """Forget each row's committed tokens beyond its length."""
        self.lengths = [min(pair) for pair in zip(self.lengths, lengths, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in ascending order."""
        unmoved = next((index for index, row in enumerate(rows) if index != row), len(rows))
        moved = torch.tensor(rows[unmoved:], dtype=torch.long)
        on_device: dict[torch.device, Tensor] = {}
        for layer in self.layers:
            if layer.is_initialized:
                if layer.device not in on_device:
                    on_device[layer.device] = copy_packed({"rows": moved}, layer.device)["rows"]
                layer.select(unmoved, on_device[layer.device])
        self.lengths = [self.lengths[row] for row in rows]

    def replace(self, rows: Sequence[int], other: TreeCache) -> None:
        """Replace these rows by the rows of another cache, in order."""
        self.capacity = self._choose_capacity(max(other.lengths))
        for number, layer in enumerate(other.layers):
            if number == len(self.layers):
                self.layers.append(self._make_layer())
            if layer.is_initialized:
                self.layers[number].replace(rows, layer)
        for row, length in zip(rows, other.lengths, strict=True):
            self.lengths[row] = length

    def round_rows(self, rows: int) -> int:
        """How many rows are allocated for so many."""
        return rows

    def _choose_capacity(self, slots: int) -> int:
        if slots <= self.capacity:
            return self.capacity
        return -(-max(slots, self.capacity * 3 // 2) // GROWTH) * GROWTH


class TreeCacheLayer(CacheLayerMixin):
    """One layer's keys and values, [B, H, S, D] each. Layers with a window keep all tokens; the mask applies it."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: TreeCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows = self.cache.round_rows(len(self.cache.lengths))
        self.keys, self.values = (
            states.new_zeros(rows, states.shape[1], self.cache.capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new nodes, [B, H, N, D] each, and return all used slots."""
        self._allocate(key_states, value_states)
        self._write(self.keys, key_states)
        self._write(self.values, value_states)
        return self.keys[:, :, : self.cache.used], self.values[:, :, : self.cache.used]

    def allocated(self) -> tuple[Tensor, Tensor]:
        """The keys and values in all slots, grown to the cache's capacity."""
        self._grow()
        return self.keys, self.values

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy slots `source` [B, T] to slots `destination`. They may overlap."""
        row = torch.arange(source.shape[0], device=self.device)[:, None]
        for states in (self.keys, self.values):
            states[row, :, destination] = states[row, :, source]

    def select(self, unmoved: int, moved: Tensor) -> None:
        """Go on with the first `unmoved` rows and the rows `moved`, which are moved up in place.

        Copying all rows would cost more than a forward pass.
        """
        slots, count = slice(0, max(self.cache.lengths)), unmoved + len(moved)
        for states in (self.keys, self.values):
            if len(moved):
                states[unmoved:count, :, slots] = states[moved, :, slots]
        rows = self.cache.round_rows(count)
        self.keys, self.values = self.keys[:rows], self.values[:rows]

    def replace(self, rows: Sequence[int], other: TreeCacheLayer) -> None:
        """Copy the committed slots of another layer's rows to these rows, in order."""
        self._allocate(other.keys, other.values)
        index, slots = torch.tensor(rows, device=self.device), slice(0, max(other.cache.lengths))
        self.keys[index, :, slots] = other.keys[:, :, slots]
        self.values[index, :, slots] = other.values[:, :, slots]

    def get_seq_length(self) -> int:
        return max(self.cache.lengths)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.used, 0

    def get_max_length(self) -> int:
        return -1

    def _allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._grow()

    def _grow(self) -> None:
        missing = self.cache.capacity - self.keys.shape[2]
        if missing > 0:
            self.keys, self.values = (
                nn.functional.pad(states, (0, 0, 0, missing)) for states in (self.keys, self.values)
            )

    def _write(self, states: Tensor, new: Tensor) -> None:
        slots = self.cache.slots
        if isinstance(slots, slice):
            states[:, :, slots] = new
        else:
            row = torch.arange(new.shape[0], device=new.device)[:, None]
            states[row, :, slots.to(new.device)] = new.transpose(1, 2)
