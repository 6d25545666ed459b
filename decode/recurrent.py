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

from collections.abc import Callable, Generator, Sequence
from operator import add
from typing import Any, TypeAlias
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from decode.kv_cache import BUCKET, TreeCache, TreeCacheLayer
from decode.models.stock_model import StockModel
from decode.session import ALIKE, Fuse, Read, Session, Verdict, group_by_length
from decode.trees.sampling import Sampling
from decode.trees.tree import Tree

STATES = "conv_states", "recurrent_states"  # of a layer: dicts of tensors [B, ...] by the number of the state
EVERY, MOST_MARKS = 128, 4  # tokens between the states of a text that are kept, and how many of them at most
MOST_GIVEN = 8  # tokens of a row; more of them are committed by a pass of their own
FLAGS = "has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized", "conv_kernel_size"
Index: TypeAlias = Callable[[torch.device], Tensor]  # rows, on each device
States: TypeAlias = dict[tuple[str, int], Tensor]  # of a layer and a row, by name and number


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

    def read_row(self, row: int) -> States:
        """A copy of a row's states."""
        return {
            (name, number): state[row].clone()
            for name in STATES
            for number, state in getattr(self, name).items()
            if state is not None
        }

    def write_row(self, row: int, states: States) -> None:
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


class StateAndAttentionLayer(StateLayer, TreeCacheLayer):
    """A layer with both a state, and keys and values."""

    def __init__(self, cache: Any, number_of_states: int) -> None:
        TreeCacheLayer.__init__(self, cache)
        StateLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """transformers names the arguments of states only."""
        (TreeCacheLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)


class StateCache(TreeCache):
    """The KV cache and the states of a batch.

    given: of each row, committed tokens that its state has not seen. marks: of each row, states at earlier places of
    its text, as (tokens, the states of each layer).
    """

    def __init__(self, batch: int, config: PretrainedConfig) -> None:
        layers = DynamicCache(config=config).layers
        super().__init__(batch, sum(hasattr(layer, "is_sliding") for layer in layers))
        self.given: list[list[int]] = [[] for _ in range(batch)]
        self.marks: list[list[tuple[int, list[States]]]] = [[] for _ in range(batch)]
        self.layers = [self._make(layer) for layer in layers]
        self.states = [layer for layer in self.layers if isinstance(layer, StateLayer)]
        self.is_ahead = False  # a pass has changed the states, and was not kept
        self._config = config

    def _make(self, layer: Any) -> Any:
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            return self._make_layer() if hasattr(layer, "is_sliding") else StateLayer(0)  # an MLP of nemotron_h
        number = layer.number_of_states
        return StateAndAttentionLayer(proxy(self), number) if hasattr(layer, "is_sliding") else StateLayer(number)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Also of models without attention layers."""
        return max(self.lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.used, 0

    def allocated(self, number: int) -> tuple[Tensor, Tensor] | None:
        """As that of `TreeCache`; None for layers with a state."""
        return None if isinstance(self.layers[number], StateLayer) else super().allocated(number)

    def begin(self, is_single: bool) -> None:
        """Prepare a pass after what is committed."""
        self.forget()
        for layer in self.states:
            layer.begin(is_single)
        self.is_ahead = True

    def learn(self, is_single: bool) -> None:
        """Take in what the pass did, before another continues it."""
        for layer in self.states:
            layer.learn(is_single)

    def end(self, kept: Sequence[bool]) -> None:
        """Commit what the pass made of these rows' states, and go back in the others."""
        if not all(kept):
            rows = _index(kept)
            for layer in self.states:
                layer.restore_all_but(rows) if any(kept) else layer.restore()
        self.is_ahead = False

    def forget(self) -> None:
        """Go back to what is committed, if a pass was not kept."""
        if self.is_ahead:
            self.end([False])

    def load_states(self, cache: Cache) -> None:
        """Take the states of a cache of transformers, for all rows."""
        layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
        rows, stateful = _index(range(len(self.lengths))), [layer for layer in self.states if layer.number_of_states]
        for layer, another in zip(stateful, layers, strict=True):
            layer.replace_states(rows, another, rows, len(self.lengths))

    def view(self, row: int) -> StateCache:
        """A cache of one row, whose keys and values are those of this one."""
        self.grow(self.lengths[row] + len(self.given[row]) + BUCKET)
        part, index = StateCache(1, self._config), _index([row])
        for layer, viewed in zip(self.layers, part.layers, strict=True):
            if layer.is_initialized:
                viewed.keys, viewed.values = layer.keys[row : row + 1], layer.values[row : row + 1]
                viewed.dtype, viewed.device, viewed.is_initialized = layer.dtype, layer.device, True
            if isinstance(layer, StateLayer):
                viewed.replace_states(_index([0]), layer, index, 1)
        part.capacity, part.lengths = self.capacity, [self.lengths[row]]
        part.given, part.marks = [self.given[row]], [self.marks[row]]
        return part

    def take_back(self, row: int, part: StateCache) -> None:
        """Take what was committed in the view of a row."""
        rows, sources = _index([row]), _index([0])
        for layer, viewed in zip(self.states, part.states, strict=True):
            layer.replace_states(rows, viewed, sources, len(self.lengths))
        self.lengths[row], self.given[row], self.marks[row] = part.lengths[0], part.given[0], part.marks[0]

    def mark(self) -> None:
        """Keep each row's states every `EVERY` tokens, in long texts every quarter of their length."""
        for row, (length, marks) in enumerate(zip(self.lengths, self.marks, strict=True)):
            if length - (marks[-1][0] if marks else 0) >= max(EVERY, length // MOST_MARKS):
                marks.append((length, [layer.read_row(row) for layer in self.states]))
                self.marks[row] = marks[1::2] if len(marks) > MOST_MARKS else marks

    def find_mark(self, row: int, length: int) -> int:
        """The most tokens of a row, `length` at most, whose states are known; 0 if there are none."""
        known = [self.lengths[row], *(place for place, _ in self.marks[row])]
        return max((place for place in known if place <= length), default=0)

    def rewind(self, row: int, length: int) -> None:
        """Go back to a place that `find_mark` has found."""
        if length < self.lengths[row]:
            states = dict(self.marks[row]).get(length, [{} for _ in self.states])
            for layer, kept in zip(self.states, states, strict=True):
                layer.write_row(row, kept)
        self.given[row], self.marks[row] = [], [mark for mark in self.marks[row] if mark[0] <= length]
        self.lengths[row] = length

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.given, self.marks = [self.given[row] for row in rows], [self.marks[row] for row in rows]
        index = _index(rows)
        for layer in self.states:
            layer.change(lambda state: state[index(state.device)])

    def add_rows(self, count: int) -> None:
        super().add_rows(count)
        self.given += [[] for _ in range(count)]
        self.marks += [[] for _ in range(count)]
        for layer in self.states:
            layer.change(lambda state: torch.cat([state, state.new_zeros(count, *state.shape[1:])]))

    def replace(self, rows: Sequence[int], other: TreeCache, sources: Sequence[int] | None = None) -> None:
        assert isinstance(other, StateCache)
        sources = range(len(other.lengths)) if sources is None else sources
        super().replace(rows, other, sources)
        for row, source in zip(rows, sources, strict=True):
            self.given[row], self.marks[row] = [*other.given[source]], [*other.marks[source]]
        index, source_index = _index(rows), _index(sources)
        for layer, another in zip(self.states, other.states, strict=True):
            layer.replace_states(index, another, source_index, len(self.lengths))


class StateSession(Session):
    """A session for a target with a recurrent state."""

    cache: StateCache
    alike = 1  # rows of a prefill are equally long

    def __init__(self, target: StockModel, batch: int, layers: Sequence[int] = ()) -> None:
        super().__init__(target, batch, layers)
        self.cache = StateCache(batch, target.config)
        self._chains: list[list[int]] = []  # of the last pass
        self._width = 0  # of that pass, with given tokens

    @property
    def lengths(self) -> list[int]:
        return [*map(add, self.cache.lengths, self.count_given())]

    def count_given(self) -> list[int]:
        return [*map(len, self.cache.given)]

    def open(self, batch: int) -> StateSession:
        session = StateSession(self.target, batch, self.layers)
        session.keeps_beginnings = self.keeps_beginnings
        return session

    @torch.no_grad()
    def verify(
        self, tree: Tree, *, start: int = 0, only: Sequence[int] | None = None, sampling: Sampling | None = None
    ) -> Verdict:
        """As `Session.verify`, for chains. With `start`, all rows must be equally long, and have been before."""
        if not tree.is_chain:
            raise ValueError(f"{self.target.config.model_type} keeps a recurrent state, so it verifies chains only")
        pairs = zip(tree.tokens.tolist(), tree.sizes.tolist(), strict=True)
        self._chains, self._upload = [tokens[:size] for tokens, size in pairs], None  # the upload has no given tokens
        if not start:
            self._catch_up(only_roots=tree.width == 1)
        given = self.cache.given
        whole = Tree.chain([before + chain for before, chain in zip(given, self._chains, strict=True)])
        self._width, is_single = whole.width, whole.width == 1
        begin = len(given[0]) + start if start else 0  # the first node that this pass computes
        nodes = range(start, tree.width)  # whose results are returned; padding gets the result of a real node
        places = [[min(len(before) + node, whole.width - 1) - begin for node in nodes] for before in given]
        wanted = places if only is None else [[row[node] for node in only] for row in places]
        computed = None if only is None else sorted({place for row in wanted for place in row})
        if not start:
            self.cache.begin(is_single)
        verdict = super().verify(whole, start=begin, only=computed)
        if not start:
            self.cache.learn(is_single)
        if computed is not None:
            wanted = [[computed.index(place) for place in row] for row in wanted]
        features = None if verdict.features is None else _take(verdict.features, places)
        return Verdict(_take(verdict.logits, wanted), features)

    def _catch_up(self, only_roots: bool) -> None:
        """Commit given tokens by passes of their own: of rows with many of them, and those that keep rows apart.

        Where no row has drafts, rows with different numbers of given tokens would never meet: the longest one is
        committed, the others get a further token to give.
        """
        counts = self.count_given()
        is_apart = only_roots and len(set(counts)) > 1
        for row, count in enumerate(counts):
            if count > MOST_GIVEN or (is_apart and count):
                self._commit_given(row)

    def _commit_given(self, row: int) -> None:
        part = StateSession(self.target, 1)
        part.cache = self.cache.view(row)
        tokens, part.cache.given = part.cache.given[0], [[]]
        part.verify(Tree.chain([tokens]), only=[0])
        part.keep([range(len(tokens))])
        self.cache.take_back(row, part.cache)

    def _model_inputs(self, tree: Tree, start: int, lengths: Tensor) -> dict[str, Any]:
        inputs = super()._model_inputs(tree, start, lengths)
        if isinstance(inputs["attention_mask"], dict):
            inputs["attention_mask"] |= dict.fromkeys(("linear_attention", "conv"))  # padding comes last
        if not self.target.takes_positions:  # there are no attention layers
            inputs["attention_mask"] = None
            del inputs["position_ids"]
        return inputs

    def keep(self, path: Sequence[Sequence[int]]) -> None:
        if not self.cache.is_ahead:  # nothing was verified
            return
        rows = [*zip(self.cache.given, self._chains, map(len, path), strict=True)]
        kept = [count == len(chain) and len(given) + count == self._width for given, chain, count in rows]
        self.cache.end(kept)
        self.cache.commit([self._width if is_kept else 0 for is_kept in kept])
        if self.keeps_beginnings:
            self.cache.mark()
        self.cache.given = [
            [] if is_kept else given + chain[:count] for is_kept, (given, chain, count) in zip(kept, rows, strict=True)
        ]

    def read(
        self, tokens: Sequence[Sequence[int]], fuse: Fuse | None = None, most: int | None = None
    ) -> Generator[None, None, Read]:
        """As `Session.read`. After it, no row has given tokens. Rows of different lengths are read in groups."""
        if self.keeps_beginnings and not self.target.backend.pass_tokens:  # longer passes are not faster
            most = EVERY * len(tokens) if most is None else min(most, EVERY * len(tokens))
        counts = [*map(add, self.count_given(), map(len, tokens))]
        groups = group_by_length(counts, self.alike)
        if len(groups) == 1 or max(counts) < ALIKE:
            read = yield from super().read(tokens, fuse, most)
            for row, count in enumerate(self.count_given()):
                if count:
                    self._commit_given(row)
            return read
        logits, features = [torch.empty(0)] * len(tokens), [torch.empty(0)] * len(tokens)
        for rows in groups:
            part = self.open(0)
            part.join(self, rows)
            found, states = yield from part.read([tokens[row] for row in rows], fuse, most)
            self.cache.replace(rows, part.cache)
            for place, row in enumerate(rows):
                logits[row] = found[place]
                if states is not None:
                    features[row] = states[place, : len(tokens[row])]
        return torch.stack(logits), pad_sequence(features, batch_first=True) if self.layers else None

    def find_beginning(self, row: int, length: int) -> int:
        return self.cache.find_mark(row, length)

    def rewind(self, row: int, length: int) -> None:
        self._move_now()
        self.cache.rewind(row, self.find_beginning(row, length))

    def count_state_bytes(self, row: int) -> int:
        return (1 + len(self.cache.marks[row])) * sum(layer.count_bytes(row) for layer in self.cache.states)

    def _move_now(self) -> None:
        super()._move_now()
        self.cache.forget()


def open_session(target: StockModel, batch: int, layers: Sequence[int] = ()) -> Session:
    """An empty session of a target, without graphs."""
    return (StateSession if target.is_recurrent else Session)(target, batch, layers)


def _index(rows: Sequence[int]) -> Index:
    """Rows, copied to each device once."""
    copies: dict[torch.device, Tensor] = {}

    def find(device: torch.device) -> Tensor:
        if device not in copies:
            copies[device] = torch.tensor([*rows]).to(device)
        return copies[device]

    return find


def _take(results: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """The results [B, n, *] at each row's places, of [B, N, *]."""
    first = [*places[0]]
    if any([*row] != first for row in places):
        return results[torch.arange(len(places))[:, None], torch.tensor(places)]
    return results if len(first) == results.shape[1] else results[:, first]
