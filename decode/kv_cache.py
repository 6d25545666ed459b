"""The KV cache for verifying trees: preallocated, compacted in place, with its own length for each row.

Shapes: L layers, B rows, H key-value heads, S slots, N nodes, T path nodes, D head size. The slot of a committed token
is its position. The nodes being verified follow: node i of row b is in slot lengths[b] + i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any
from weakref import proxy

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from decode.devices.backend import find_backend
from decode.devices.transfer import copy_packed

BUCKET = 64  # the number of used slots is rounded up to this, so that attention sees few different shapes
GROWTH = 256  # allocations are rounded up to this
TOGETHER = 8  # layers that share tensors; with more of them, growing and moving rows would need more memory


class KVCache(Cache):
    """A transformers `Cache` whose layers write to the slots that were reserved. Attention sees the used slots.

    round_rows: how many rows are allocated for so many.
    """

    def __init__(self, rows: int, layer_count: int = 1, round_rows: Callable[[int], int] = int) -> None:
        # A reference cycle would keep the memory of an unused cache until the garbage collector runs.
        cache: Any = proxy(self)
        self.make_layer = partial(KVLayer, cache)
        super().__init__(layer_class_to_replicate=self.make_layer)
        self.blocks: list[Block] = []
        self.lengths = [0] * rows  # committed tokens of each row, on the host
        self.capacity = 0  # slots that are allocated
        self.used = 0  # slots that attention sees
        self.node_slots = torch.empty(rows, 0, dtype=torch.long)  # [B, N]
        self.slots: slice | Tensor = slice(0, 0)  # the same, as a slice if all rows are equally long
        self.computed: Any = None  # layers of the pass that are computed already; see `decode.cpu.compiled_layers`
        self._node_rows: Tensor | None = None
        self._layer_count, self._round_rows = layer_count, round_rows

    def reserve(
        self, start: int, count: int, device: torch.device, lengths: Tensor | None = None, exact: bool = False
    ) -> Tensor:
        """Make room for nodes start..start+count-1 of each row. Returns the lengths as a tensor [B].

        lengths: that tensor, if it is on the device already. exact: attention sees no slot beyond the nodes.
        """
        longest = max(self.lengths)
        end = longest + start + count
        bucket = -(-end // BUCKET) * BUCKET
        self.grow(bucket, start)
        lengths = torch.tensor(self.lengths).to(device) if lengths is None else lengths
        self.place(lengths, start, count)
        self.used = end if exact else bucket
        if min(self.lengths) == longest:
            self.slots = slice(longest + start, end)
        return lengths

    def place(self, lengths: Tensor, start: int, count: int) -> None:
        """Choose the slots of nodes start..start+count-1, which are allocated, after `lengths` [B] committed tokens."""
        self.slots = self.node_slots = lengths[:, None] + torch.arange(start, start + count, device=lengths.device)
        self._node_rows = None

    def reserve_flat(self, real: Tensor) -> None:
        """Make the nodes that were reserved one row, without padding: `real` [B, N] tells those that are none."""
        self._node_rows = real.nonzero()[:, 0][None]
        self.slots = self.node_slots = self.node_slots[real][None]  # [1, T]

    @property
    def node_rows(self) -> Tensor:
        """The rows of the nodes [B, N], as `node_slots`."""
        if self._node_rows is None:
            self._node_rows = torch.zeros_like(self.node_slots)
            if (rows := len(self.node_slots)) > 1:
                self._node_rows += torch.arange(rows, device=self.node_slots.device)[:, None]
        return self._node_rows

    @property
    def states(self) -> list[Tensor]:
        """All keys and values, of the rows that are allocated: other tensors once they have moved in memory."""
        return [states for block in self.blocks for states in (block.keys, block.values)]

    def plan_moves(self, path: Sequence[Sequence[int]]) -> Tensor | None:
        """The slots [2, B, T] of the nodes of each row's path, and those they go to; None if all are in place."""
        if all(node == place for row in path for place, node in enumerate(row)):  # a chain
            return None
        width = max(map(len, path))
        starts, nodes = torch.tensor(self.lengths)[:, None], [[*row, *range(len(row), width)] for row in path]
        return torch.stack([starts + torch.tensor(nodes), starts + torch.arange(width)])

    def move(self, moves: Tensor) -> None:
        """Copy slots as planned, in all layers."""
        copy = cache(moves.to)  # to each device once
        for block in self.blocks:
            source, destination = copy(block.keys.device)
            row = torch.arange(len(source), device=source.device)[:, None]
            for states in (block.keys, block.values):  # slots may overlap
                states[:, row, :, destination] = states[:, row, :, source]

    def commit(self, counts: Sequence[int]) -> None:
        """Count each row's first counts[b] nodes, which are in place, as committed."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def allocated(self, number: int) -> tuple[Tensor, Tensor] | None:
        """The keys and values of a layer that has nothing else, in all slots; None before its first write."""
        layer = self.layers[number] if number < len(self.layers) else None
        return (layer.keys, layer.values) if type(layer) is KVLayer and layer.is_initialized else None

    def allocate(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Allocate a layer for keys and values such as these [B, H, N, D], before its first write. See `allocated`."""
        while len(self.layers) <= number:
            self.layers.append(self.make_layer())
        if type(layer := self.layers[number]) is KVLayer and not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        return self.allocated(number)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order. None may come later than it was: `rows[i] >= i`."""
        moves = [(row, place, self.lengths[row]) for place, row in enumerate(rows) if row != place]
        for block in self.blocks:
            block.move_rows(moves, self.used)
        self.lengths = [self.lengths[row] for row in rows]
        self._show_rows()

    def add_rows(self, count: int) -> None:
        """Add empty rows after the others."""
        self.lengths += [0] * count
        self._show_rows()

    @torch.inference_mode()  # the cache was made in it
    def restart(self, rows: int) -> None:
        """Forget all tokens. Memory stays where it is, and is cleared: 0 times a NaN in a hidden slot would be NaN."""
        self.lengths = [0] * rows
        for states in self.states:
            states.zero_()
        self._show_rows()

    def _show_rows(self) -> None:
        """Let layers see as many rows as there are. New ones are allocated for as many again: few joins allocate."""
        rows = self._round_rows(len(self.lengths))
        for block in self.blocks:
            have = min(block.keys.shape[1], block.values.shape[1])  # after a lack of memory one may have more
            if rows > have:
                block.allocate(max(rows, 2 * have), self.capacity, self.lengths)
            block.rows = rows
            block.hold(block.keys, block.values)

    def replace(self, rows: Sequence[int], other: KVCache, sources: Sequence[int]) -> None:
        """Replace these rows by the rows `sources` of another cache, in order."""
        slots = max((other.lengths[source] for source in sources), default=0)
        self.grow(slots)
        index = torch.tensor([[*rows], [*sources]])
        copy = cache(lambda device: copy_packed({"rows": index}, device)["rows"])
        for number, layer in enumerate(other.layers):
            if number == len(self.layers):
                self.layers.append(self.make_layer())
            if slots and layer.is_initialized:  # without tokens, rows stay as they are in a new cache
                self.layers[number].replace(*copy(layer.device), layer, slots)
        for row, source in zip(rows, sources, strict=True):
            self.lengths[row] = other.lengths[source]

    def clear_free_slots(self) -> None:
        """Zero all slots beyond each row's length."""
        for states in self.states:  # [L, R, H, S, D]
            slot = torch.arange(states.shape[3], device=states.device)
            free = slot >= torch.tensor(self.lengths, device=states.device)[:, None]  # [B, S]
            states[:, : len(self.lengths)].masked_fill_(free[:, None, :, None], 0)
            states[:, len(self.lengths) :].zero_()

    def grow(self, slots: int, nodes: int = 0) -> None:
        """Allocate so many slots of each row, and some more. nodes: of each row that are kept with its tokens."""
        for block in self.blocks:
            if len(block.layers) < len(block.keys):
                block.trim()  # all layers have been written to
        if slots > self.capacity:
            capacity = -(-max(slots, self.capacity * 3 // 2) // GROWTH) * GROWTH
            filled = [min(length + nodes, self.capacity) for length in self.lengths]
            for block in self.blocks:
                block.allocate(block.keys.shape[1], capacity, filled)
            self.capacity = capacity

    def add(self, layer: KVLayer, keys: Tensor, values: Tensor) -> None:
        """Allocate a layer, for keys and values such as these [B, H, N, D]."""
        block = next((block for block in self.blocks if block.has_room_for(keys, values)), None)
        if block is None:
            left = self._layer_count - sum(len(block.keys) for block in self.blocks)
            shape = max(1, min(left, TOGETHER)), self._round_rows(len(self.lengths)), self.capacity
            block = Block(*(_allocate(states, *shape) for states in (keys, values)))
            self.blocks.append(block)
        block.layers.append(layer)
        block.hold(block.keys, block.values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Also of models without attention layers."""
        return max(self.lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.used, 0


class Block:
    """Keys and values of several layers, [L, R, H, S, D] each. Tokens and rows move in all these layers at once.

    Layers see the first `rows` of the R rows; the others wait for requests that join.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.layers: list[KVLayer] = []
        self.rows = keys.shape[1]
        self.hold(keys, values)

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Keep these tensors, and give each layer its part of them."""
        self.keys, self.values = keys, values
        with torch.enable_grad():  # torch refuses to write with gradients to views that were made without
            for place, layer in enumerate(self.layers):
                layer.keys, layer.values = keys[place, : self.rows], values[place, : self.rows]

    def has_room_for(self, keys: Tensor, values: Tensor) -> bool:
        """Whether another layer can be added whose keys and values are such as these [B, H, N, D]."""
        pairs = (keys, self.keys), (values, self.values)
        return len(self.layers) < len(self.keys) and all(_kind(new) == _kind(held) for new, held in pairs)

    def trim(self) -> None:
        """Free the parts that no layer has taken: other layers have another shape, or use another layer's keys."""
        count = len(self.layers)
        self.hold(self.keys[:count].clone(), self.values[:count].clone())

    def allocate(self, rows: int, slots: int, filled: Sequence[int]) -> None:
        """Move to new memory for so many rows and slots, with the first `filled[b]` slots of each row."""
        self.hold(_enlarge(self.keys, rows, slots, filled), self.values)  # one after the other takes less memory
        self.hold(self.keys, _enlarge(self.values, rows, slots, filled))

    def move_rows(self, moves: Sequence[tuple[int, int, int]], used: int) -> None:
        """Copy rows in order, each (source, destination, slots) of them.

        used: slots that may have been written to. Those of the row before are cleared: 0 times a NaN would be NaN.
        """
        for source, destination, slots in moves:
            for states in (self.keys, self.values):
                states[:, destination, :, :slots] = states[:, source, :, :slots]
                states[:, destination, :, slots:used] = 0


def _enlarge(states: Tensor, rows: int, slots: int, filled: Sequence[int]) -> Tensor:
    larger = _allocate(states, len(states), rows, slots)
    for row, count in enumerate(filled[: states.shape[1]]):
        larger[:, row, :, :count] = states[:, row, :, :count]
    return larger


def _allocate(like: Tensor, layers: int, rows: int, slots: int) -> Tensor:
    return find_backend(like.device).make_zeros((layers, rows, like.shape[-3], slots, like.shape[-1]), like)


def _kind(states: Tensor) -> tuple[Any, ...]:
    """What is the same in all layers of a block."""
    return states.shape[-3], states.shape[-1], states.dtype, states.device


class KVLayer(CacheLayerMixin):
    """One layer's keys and values, [B, H, S, D] each. Layers with a window keep all tokens; the mask applies it."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.cache.add(self, key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new nodes, [B, H, N, D] each, and return all used slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self.cache.slots
        for states, new in ((self.keys, key_states), (self.values, value_states)):
            if isinstance(slots, slice):
                states[:, :, slots] = new
            else:
                states[self.cache.node_rows.to(new.device), :, slots.to(new.device)] = new.transpose(1, 2)
        return self.keys[:, :, : self.cache.used], self.values[:, :, : self.cache.used]

    def replace(self, rows: Tensor, sources: Tensor, other: KVLayer, count: int) -> None:
        """Copy the first `count` slots of another layer's rows `sources` to these rows, in order."""
        if not self.is_initialized:
            self.lazy_initialization(other.keys, other.values)
        self.keys[rows, :, :count] = other.keys[sources, :, :count]
        self.values[rows, :, :count] = other.values[sources, :, :count]

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return -1
