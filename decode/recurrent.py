"""Targets with a recurrent state: linear-attention, state-space and convolution layers, alone or between attention.

Such a state can neither branch nor be rolled back, but it can be kept. So trees are chains, and the state before a pass
is kept until it is known what was accepted. If all nodes of the chain were, the state after the pass is the committed
one. Else the kept one comes back, and the accepted tokens are given once more at the beginning of the next chain. No
model code is touched.

Padding enters a state, so a row that is shorter than others counts as rejected: its accepted tokens are given again. In
the next pass they take the place of padding.

Shapes: B rows, N nodes, V vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias
from weakref import proxy

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from decode.kv_cache import BUCKET, KVCache, KVLayer
from decode.trees.tree import Tree

STATES = "conv_states", "recurrent_states"  # of a layer: dicts of tensors [B, ...] by the number of the state
EVERY, MOST_MARKS = 128, 4  # tokens between the states of a text that are kept, and how many of them at most
MOST_GIVEN = 8  # tokens of a row; more of them are committed by a pass of their own
FLAGS = "has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized", "conv_kernel_size"
Index: TypeAlias = Callable[[torch.device], Tensor]  # rows, on each device
LayerStates: TypeAlias = dict[tuple[str, int], Tensor]  # of a layer and a row, by name and number


class StateLayer(LinearAttentionLayer):
    """The states of one layer, and those before the last pass.

    Most passes make new tensors, so keeping the old ones costs nothing. Where one writes to the old tensor, it gets a
    copy. The first pass of a kind tells: passes over one node take another rule than longer ones.
    """

    dtype: Any
    device: Any
    is_initialized = False  # it has no keys and values

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self._before: dict[str, dict[int, Any]] = {}
        self._working: dict[tuple[str, int], Tensor | None] = {}  # what the pass works on
        self._replaced: set[tuple[str, int, bool]] = set()  # states that a pass (of one node, or not) leaves alone

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """As transformers' own, but the old state stays as it is."""
        if not self.is_conv_states_initialized[state_idx]:
            self.lazy_initialization(conv_states=conv_states, state_idx=state_idx, conv_kernel_size=conv_kernel_size)
        width: int = self.conv_kernel_size[state_idx]
        if self.has_previous_state[state_idx]:
            conv_states = torch.cat([self.conv_states[state_idx], conv_states], dim=-1)
        self.has_previous_state[state_idx] = True
        conv_states = nn.functional.pad(conv_states, (max(width - conv_states.shape[-1], 0), 0))
        self.conv_states[state_idx] = conv_states[..., -width:].clone()
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """As transformers' own, but the old state stays as it is."""
        if not self.is_recurrent_states_initialized[state_idx]:
            self.lazy_initialization(recurrent_states=recurrent_states, state_idx=state_idx)
        state = recurrent_states.to(self.recurrent_states[state_idx].dtype)
        is_part = state.untyped_storage().nbytes() > state.nbytes  # of the states after all chunks
        self.recurrent_states[state_idx] = state.clone() if is_part else state
        return self.recurrent_states[state_idx]

    def begin(self, is_single: bool) -> None:
        """Keep the states before a pass, which is over one node or more."""
        self._before = {name: dict(getattr(self, name)) for name in (*STATES, *FLAGS)}
        for name in STATES:
            states = getattr(self, name)
            for number, state in self._before[name].items():
                if state is not None and (name, number, is_single) not in self._replaced:
                    states[number] = state.clone()
                self._working[name, number] = states[number]

    def learn(self, is_single: bool) -> None:
        """Take in which states the pass has replaced."""
        for (name, number), state in self._working.items():
            if state is not None and getattr(self, name)[number] is not state:
                self._replaced.add((name, number, is_single))

    def restore(self) -> None:
        """Go back to the states before the pass."""
        for name, before in self._before.items():
            setattr(self, name, dict(before))

    def restore_all_but(self, kept: Index) -> None:
        """Go back to the states before the pass, except in the rows `kept` [B] (bool)."""
        for states, before in ((getattr(self, name), self._before[name]) for name in STATES):
            for number, state in states.items():
                if state is not None:
                    old = torch.zeros_like(state) if before[number] is None else before[number]
                    is_kept = kept(state.device).view(-1, *[1] * (state.dim() - 1))
                    states[number] = torch.where(is_kept, state, old)

    def count_bytes(self, row: int) -> int:
        """The bytes of a row's states."""
        states = [state for name in STATES for state in getattr(self, name).values() if state is not None]
        return sum(state[row].nbytes for state in states)

    def read_row(self, row: int) -> LayerStates:
        """A copy of a row's states."""
        return {
            (name, number): state[row].clone()
            for name in STATES
            for number, state in getattr(self, name).items()
            if state is not None
        }

    def write_row(self, row: int, states: LayerStates) -> None:
        """Replace a row's states; those that are not given become zeros."""
        for name in STATES:
            for number, state in getattr(self, name).items():
                if state is not None:
                    getattr(self, name)[number] = new = state.clone()
                    new[row] = states.get((name, number), 0)

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each state by what `change` makes of it."""
        for states in (getattr(self, name) for name in STATES):
            for number, state in states.items():
                states[number] = state if state is None else change(state)

    def replace_states(self, rows: Index, other: LinearAttentionCacheLayerMixin, sources: Index, batch: int) -> None:
        """Replace rows of the `batch` by rows of another layer. Where that has seen nothing, they become zeros."""
        if not any(other.has_previous_state.values()):
            self.change(lambda state: state.index_fill(0, rows(state.device), 0))
            return
        for name in FLAGS:
            setattr(self, name, dict(getattr(other, name)))
        self.dtype, self.device = other.dtype, other.device
        for name in STATES:
            states = getattr(self, name)
            for number, state in getattr(other, name).items():
                if state is not None:
                    old = state.new_zeros(batch, *state.shape[1:]) if states[number] is None else states[number]
                    states[number] = old.index_copy(0, rows(state.device), state[sources(state.device)])


class StateAndAttentionLayer(StateLayer, KVLayer):
    """A layer with both a state, and keys and values."""

    def __init__(self, cache: Any, number_of_states: int) -> None:
        KVLayer.__init__(self, cache)
        StateLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """transformers names the arguments of states only."""
        (KVLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)


@dataclass(frozen=True)
class Replay:
    """A pass over the chains of a tree, each after its row's given tokens.

    tree: given tokens and chains. start: the first of its nodes that is computed. only: those computed nodes, counted
    from there, that have logits; None: all. nodes, logits: where each row's results are among those of the pass.
    """

    tree: Tree
    start: int
    only: list[int] | None
    nodes: list[list[int]]
    logits: list[list[int]]

    def take(self, logits: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The logits [B, n, V] that were asked for, and the features [B, n, F] of the tree's nodes."""
        return _take(logits, self.logits), None if features is None else _take(features, self.nodes)


class States:
    """The states of a session's rows, and the KV cache in which their layers are.

    given: of each row, committed tokens that its states have not seen. marks: of each row, states at earlier places of
    its text, as (tokens, the states of each layer).
    """

    def __init__(self, rows: int, config: PretrainedConfig) -> None:
        layers = DynamicCache(config=config).layers
        self.cache = KVCache(rows, sum(hasattr(layer, "is_sliding") for layer in layers))
        self.cache.layers = [self._make(layer) for layer in layers]
        self.layers = [layer for layer in self.cache.layers if isinstance(layer, StateLayer)]
        self.given: list[list[int]] = [[] for _ in range(rows)]
        self.marks: list[list[tuple[int, list[LayerStates]]]] = [[] for _ in range(rows)]
        self._config = config
        self._is_ahead = False  # a pass has changed the states, and was not kept
        self._chains: list[list[int]] = []  # of the last pass
        self._width = 0  # of that pass, with given tokens

    def _make(self, layer: Any) -> Any:
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            return self.cache.make_layer() if hasattr(layer, "is_sliding") else StateLayer(0)  # an MLP of nemotron_h
        number = layer.number_of_states
        return StateAndAttentionLayer(proxy(self.cache), number) if hasattr(layer, "is_sliding") else StateLayer(number)

    def list_behind(self, only_roots: bool) -> list[int]:
        """Rows whose given tokens need a pass of their own: they are many, or they keep rows apart.

        Where no row has drafts (`only_roots`), rows with different numbers of given tokens would never meet: the
        longest one is committed, the others get a further token to give.
        """
        counts = [*map(len, self.given)]
        is_apart = only_roots and len({*counts}) > 1
        return [row for row, count in enumerate(counts) if count > MOST_GIVEN or (is_apart and count)]

    def begin(self, tree: Tree, start: int, only: Sequence[int] | None) -> Replay:
        """Prepare a pass over chains after what is committed, or, with `start`, one that continues the last one."""
        pairs = zip(tree.tokens.tolist(), tree.sizes.tolist(), strict=True)
        self._chains = [tokens[:size] for tokens, size in pairs]
        whole = Tree.chain([before + chain for before, chain in zip(self.given, self._chains, strict=True)])
        self._width = whole.width
        if not start:
            for layer in self.layers:
                layer.begin(whole.width == 1)
            self._is_ahead = True
        first = len(self.given[0]) + start if start else 0  # the first node that this pass computes
        nodes = range(start, tree.width)  # whose results are returned; padding gets the result of a real node
        places = [[min(len(before) + node, whole.width - 1) - first for node in nodes] for before in self.given]
        if only is None:
            return Replay(whole, first, None, places, places)
        wanted = [[row[node] for node in only] for row in places]
        computed = sorted({place for row in wanted for place in row})
        return Replay(whole, first, computed, places, [[computed.index(place) for place in row] for row in wanted])

    def learn(self) -> None:
        """Take in what the pass did, before another continues it."""
        for layer in self.layers:
            layer.learn(self._width == 1)

    def keep(self, path: Sequence[Sequence[int]], marks: bool) -> None:
        """Commit nodes of the pass: with their states if all of a row were computed and kept, else as given tokens.

        marks: keep states that rows can go back to.
        """
        if not self._is_ahead:  # nothing was verified
            return
        rows = [*zip(self.given, self._chains, map(len, path), strict=True)]
        kept = [count == len(chain) and len(given) + count == self._width for given, chain, count in rows]
        self._end(kept)
        self.cache.commit([self._width if is_kept else 0 for is_kept in kept])
        if marks:
            self._mark()
        self.given = [
            [] if is_kept else given + chain[:count] for is_kept, (given, chain, count) in zip(kept, rows, strict=True)
        ]

    def forget(self) -> None:
        """Go back to what is committed, if a pass was not kept."""
        if self._is_ahead:
            self._end([False])

    def _end(self, kept: Sequence[bool]) -> None:
        """Commit what the pass made of these rows' states, and go back in the others."""
        if not all(kept):
            rows = _index(kept)
            for layer in self.layers:
                layer.restore_all_but(rows) if any(kept) else layer.restore()
        self._is_ahead = False

    def load(self, cache: Cache, sources: Sequence[int]) -> None:
        """Take the states of a cache of transformers, of these of its rows."""
        layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
        stateful = [layer for layer in self.layers if layer.number_of_states]
        rows, index = _index(range(len(self.given))), _index(sources)
        for layer, another in zip(stateful, layers, strict=True):
            layer.replace_states(rows, another, index, len(self.given))

    def view(self, row: int) -> States:
        """The states of one row, without its given tokens, in a cache whose keys and values are those of this one."""
        self.cache.grow(self.cache.lengths[row] + len(self.given[row]) + BUCKET)
        part, index = States(1, self._config), _index([row])
        for layer, viewed in zip(self.cache.layers, part.cache.layers, strict=True):
            if layer.is_initialized:
                viewed.keys, viewed.values = layer.keys[row : row + 1], layer.values[row : row + 1]
                viewed.dtype, viewed.device, viewed.is_initialized = layer.dtype, layer.device, True
            if isinstance(layer, StateLayer):
                viewed.replace_states(_index([0]), layer, index, 1)
        part.cache.capacity, part.cache.lengths = self.cache.capacity, [self.cache.lengths[row]]
        return part

    def take_back(self, row: int, part: States) -> None:
        """Take what was committed in the view of a row: all of its given tokens."""
        rows, sources = _index([row]), _index([0])
        for layer, viewed in zip(self.layers, part.layers, strict=True):
            layer.replace_states(rows, viewed, sources, len(self.given))
        self.cache.lengths[row], self.given[row] = part.cache.lengths[0], []

    def _mark(self) -> None:
        """Keep each row's states every `EVERY` tokens, in long texts every quarter of their length."""
        for row, (length, marks) in enumerate(zip(self.cache.lengths, self.marks, strict=True)):
            if length - (marks[-1][0] if marks else 0) >= max(EVERY, length // MOST_MARKS):
                marks.append((length, [layer.read_row(row) for layer in self.layers]))
                self.marks[row] = marks[1::2] if len(marks) > MOST_MARKS else marks

    def find_beginning(self, row: int, length: int) -> int:
        """The most tokens of a row, `length` at most, whose states are known; 0 if there are none."""
        known = [self.cache.lengths[row], *(place for place, _ in self.marks[row])]
        return max((place for place in known if place <= length), default=0)

    def rewind(self, row: int, length: int) -> None:
        """Go back to a place that `find_beginning` has found."""
        if length < self.cache.lengths[row]:
            states = dict(self.marks[row]).get(length, [{} for _ in self.layers])
            for layer, kept in zip(self.layers, states, strict=True):
                layer.write_row(row, kept)
        self.given[row], self.marks[row] = [], [mark for mark in self.marks[row] if mark[0] <= length]
        self.cache.lengths[row] = length

    def count_bytes(self, row: int) -> int:
        """The bytes of a row's states, those at earlier places included."""
        return (1 + len(self.marks[row])) * sum(layer.count_bytes(row) for layer in self.layers)

    def select(self, rows: Sequence[int]) -> None:
        """As `KVCache.select`, for the states."""
        self.given, self.marks = [self.given[row] for row in rows], [self.marks[row] for row in rows]
        index = _index(rows)
        for layer in self.layers:
            layer.change(lambda state: state[index(state.device)])

    def add_rows(self, count: int) -> None:
        """As `KVCache.add_rows`, for the states."""
        self.given += [[] for _ in range(count)]
        self.marks += [[] for _ in range(count)]
        for layer in self.layers:
            layer.change(lambda state: torch.cat([state, state.new_zeros(count, *state.shape[1:])]))

    def replace(self, rows: Sequence[int], other: States, sources: Sequence[int]) -> None:
        """As `KVCache.replace`, for the states."""
        for row, source in zip(rows, sources, strict=True):
            self.given[row], self.marks[row] = [*other.given[source]], [*other.marks[source]]
        index, source_index = _index(rows), _index(sources)
        for layer, another in zip(self.layers, other.layers, strict=True):
            layer.replace_states(index, another, source_index, len(self.given))


def _index(rows: Sequence[int]) -> Index:
    """Rows, copied to each device once."""
    return cache(torch.tensor([*rows]).to)


def _take(results: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """The results [B, n, *] at each row's places, of [B, N, *]."""
    first = [*places[0]]
    if any([*row] != first for row in places):
        return results[torch.arange(len(places))[:, None], torch.tensor(places)]
    return results if len(first) == results.shape[1] else results[:, first]
