"""The KV cache that a tree is verified in: preallocated, compacted in place, a write position a row.

Shapes: B rows, H key-value heads, S slots, N nodes, D head size. A committed token lies in the slot of its position;
the nodes under verification lie behind it, node i of row b in slot lengths[b] + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import proxy

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

BUCKET = 64  # attention sees the used slots rounded up to this, so that few shapes occur
GROWTH = 256  # allocation is rounded up to this
LARGE = 16  # rows of a batch from which on a cache can be gapless


class TreeCache(Cache):
    """A transformers `Cache` whose layers write where `place` says and show attention the used slots only.

    gapless: in large batches, let attention see all slots, so that the rows lie side by side, and allocate few more
    than are used: it has to grow more often.
    """

    def __init__(self, batch: int, *, gapless: bool = False) -> None:
        # A cycle would keep the memory of a cache that nobody uses until Python looks for cycles.
        itself: Any = proxy(self)
        self._make_layer = partial(TreeCacheLayer, itself)
        super().__init__(layer_class_to_replicate=self._make_layer)
        self.lengths = [0] * batch  # committed tokens of each row, on the host
        self._gapless = gapless
        self.capacity = 0
        self.used = 0  # slots that attention sees
        self.slots: slice | Tensor = slice(0, 0)
        self.places = torch.empty(batch, 0, dtype=torch.long)  # the slots of the new nodes, [B, N]

    def place(self, start: int, count: int, device: torch.device) -> Tensor:
        """Make room for nodes start..start+count-1 of each row. Returns the lengths as a tensor, [B]."""
        longest = max(self.lengths)
        end = longest + start + count
        self.used = -(-end // BUCKET) * BUCKET
        if self.gapless:
            self.capacity = self._capacity_for(self.used)
            if self.capacity <= 1.5 * self.used:  # where long rows have ended, gaps cost less than what they left
                self.used = self.capacity
        else:
            self.capacity = self._capacity_for(self.used)
        lengths = torch.tensor(self.lengths).to(device, non_blocking=device.type == "cuda")
        self.places = lengths[:, None] + torch.arange(start, start + count, device=device)
        self.slots = slice(longest + start, end) if min(self.lengths) == longest else self.places
        return lengths

    @property
    def gapless(self) -> bool:
        """Whether attention may see all slots: in large batches only."""
        return self._gapless and len(self.lengths) >= LARGE

    def keep(self, path: Tensor, counts: Sequence[int]) -> None:
        """Commit the nodes of each row's path, of which the first counts[b] are meant.

        path [B, T], on the CPU; its padding names the column that it is in, and so moves nothing.
        """
        column = torch.arange(path.shape[1])
        if bool((path != column).any()):  # a chain lies where it belongs already
            starts = torch.tensor(self.lengths)[:, None]
            moves = torch.stack([starts + path, starts + column])  # [2, B, T]
            placed: dict[torch.device, Tensor] = {}
            for layer in self.layers:
                if layer.is_initialized:  # layers that share another's keys never get their own
                    if layer.device not in placed:
                        placed[layer.device] = moves.to(layer.device, non_blocking=layer.device.type == "cuda")
                    layer.move(*placed[layer.device])
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def allocated(self, number: int) -> tuple[Tensor, Tensor] | None:
        """A layer's keys and values in all slots, used or not; None where it has not written yet."""
        layer = self.layers[number] if number < len(self.layers) else None
        return layer.allocated() if layer is not None and layer.is_initialized else None

    def crop(self, lengths: Sequence[int]) -> None:
        """Forget what was committed beyond the given lengths."""
        self.lengths = [min(pair) for pair in zip(self.lengths, lengths, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, given in ascending order."""
        for layer in self.layers:
            layer.select(rows)
        self.lengths = [self.lengths[row] for row in rows]

    def put(self, rows: Sequence[int], other: TreeCache) -> None:
        """Replace these rows by the rows of another cache, one for one."""
        self.capacity = self._capacity_for(max(other.lengths))
        for number, layer in enumerate(other.layers):
            if number == len(self.layers):
                self.layers.append(self._make_layer())
            if layer.is_initialized:
                self.layers[number].put(rows, layer)
        for row, length in zip(rows, other.lengths, strict=True):
            self.lengths[row] = length

    def _capacity_for(self, slots: int) -> int:
        if slots <= self.capacity:
            return self.capacity
        if self.gapless:
            return -(-slots // BUCKET) * BUCKET
        return -(-max(slots, self.capacity * 3 // 2) // GROWTH) * GROWTH


class TreeCacheLayer(CacheLayerMixin):
    """One layer's keys and values, [B, H, S, D] each. Windowed layers are kept whole: the mask knows the window."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: TreeCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch = len(self.cache.lengths)
        self.keys, self.values = (
            states.new_zeros(batch, states.shape[1], self.cache.capacity, states.shape[3])
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
        """All slots, with room for the new nodes among them."""
        self._grow()
        return self.keys, self.values

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` [B, T] to `target`; all are read before one is written, so they may overlap."""
        row = torch.arange(source.shape[0], device=self.device)[:, None]
        for states in (self.keys, self.values):
            states[row, :, target] = states[row, :, source]

    def select(self, rows: Sequence[int]) -> None:
        """Move these rows to the front, in place: a copy of everything would cost more than a forward pass."""
        if self.is_initialized:
            first = next((place for place, row in enumerate(rows) if place != row), len(rows))
            index = torch.tensor(rows[first:], dtype=torch.long, device=self.device)
            slots = slice(0, max(self.cache.lengths))
            for states in (self.keys, self.values):
                states[first : len(rows), :, slots] = states[index, :, slots]
            self.keys, self.values = self.keys[: len(rows)], self.values[: len(rows)]

    def put(self, rows: Sequence[int], other: TreeCacheLayer) -> None:
        """Take over another layer's committed slots, a row of it for each of these rows."""
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
        if self.keys.shape[2] < self.cache.capacity:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)

    def _write(self, states: Tensor, new: Tensor) -> None:
        slots = self.cache.slots
        if isinstance(slots, slice):
            states[:, :, slots] = new
        else:
            slots = slots.to(new.device)
            row = torch.arange(new.shape[0], device=new.device)[:, None]
            states[row, :, slots] = new.transpose(1, 2)

    def _grown(self, states: Tensor) -> Tensor:
        larger = states.new_zeros(*states.shape[:2], self.cache.capacity, states.shape[3])
        larger[:, :, : states.shape[2]] = states
        return larger
