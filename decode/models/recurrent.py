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

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from decode.kv_cache import TreeCache, TreeCacheLayer
from decode.models.stock_model import StockModel
from decode.sampling import Sampling
from decode.session import Fuse, Read, Session, Verdict, group_by_length
from decode.tree import Tree

STATES = "conv_states", "recurrent_states"  # of a layer: dicts of tensors [B, ...] by the number of the state
EVERY, MOST_MARKS = 128, 16  # tokens between the states of a text that are kept, and how many of them at most
MOST_GIVEN = 8  # tokens of a row; with more of them its next tree is the root alone, which commits all
FLAGS = (
    "has_previous_state",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "conv_kernel_size",
)


RowStates: TypeAlias = dict[tuple[str, int], Tensor]  # of a layer and a row, by name and number


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
        self._given: dict[tuple[str, int], Tensor | None] = {}  # what the pass works on
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
        self.recurrent_states[state_idx] = recurrent_states.to(self.recurrent_states[state_idx].dtype)
        return self.recurrent_states[state_idx]

    def begin(self, is_single: bool) -> None:
        """Keep the states before a pass, which is over one node or more."""
        self._before = {name: dict(getattr(self, name)) for name in (*STATES, *FLAGS)}
        for name in STATES:
            for number, state in self._before[name].items():
                if state is not None and (name, number, is_single) not in self._replaced:
                    getattr(self, name)[number] = state.clone()
                self._given[name, number] = getattr(self, name)[number]

    def learn(self, is_single: bool) -> None:
        """Take in which states the pass has replaced."""
        for (name, number), given in self._given.items():
            if given is not None and getattr(self, name)[number] is not given:
                self._replaced.add((name, number, is_single))

    def restore(self, kept: Tensor | None) -> None:
        """Go back to the states before the pass, but for the rows `kept` [B] (bool)."""
        if kept is None:
            for name, before in self._before.items():
                setattr(self, name, dict(before))
            return
        for states, before in ((getattr(self, name), self._before[name]) for name in STATES):
            for number, state in states.items():
                if state is not None:
                    old = torch.zeros_like(state) if before[number] is None else before[number]
                    states[number] = torch.where(kept.to(state.device).view(-1, *[1] * (state.dim() - 1)), state, old)

    def read_row(self, row: int) -> RowStates:
        """A copy of a row's states."""
        return {
            (name, number): state[row].clone()
            for name in STATES
            for number, state in getattr(self, name).items()
            if state is not None
        }

    def write_row(self, row: int, states: RowStates) -> None:
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

    def replace_states(
        self, rows: Sequence[int], other: LinearAttentionCacheLayerMixin, sources: Sequence[int], batch: int
    ) -> None:
        """Replace rows of the `batch` by rows of another layer."""
        for name in FLAGS:
            setattr(self, name, dict(getattr(other, name)))
        self.dtype, self.device = other.dtype, other.device
        for name in STATES:
            states = getattr(self, name)
            for number, state in getattr(other, name).items():
                if state is not None:
                    old = states[number]
                    new = state.new_zeros(batch, *state.shape[1:]) if old is None else old.clone()
                    new[[*rows]] = state[[*sources]]
                    states[number] = new


class StateAndAttentionLayer(StateLayer, TreeCacheLayer):
    """A layer with both a state, and keys and values."""

    def __init__(self, cache: TreeCache, number_of_states: int) -> None:
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
        super().__init__(batch, config.num_hidden_layers)
        self.given: list[list[int]] = [[] for _ in range(batch)]
        self.marks: list[list[tuple[int, list[RowStates]]]] = [[] for _ in range(batch)]
        self.layers = [self._make(layer) for layer in DynamicCache(config=config).layers]
        self.states = [layer for layer in self.layers if isinstance(layer, StateLayer)]
        self.is_ahead = False  # a pass has changed the states, and was not kept

    def _make(self, layer: Any) -> Any:
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            return self._make_layer() if hasattr(layer, "is_sliding") else StateLayer(0)  # one without a cache
        number = layer.number_of_states
        return StateAndAttentionLayer(self, number) if hasattr(layer, "is_sliding") else StateLayer(number)

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
            rows = torch.tensor(kept) if any(kept) else None
            for layer in self.states:
                layer.restore(rows)
        self.is_ahead = False

    def forget(self) -> None:
        """Go back to what is committed, if a pass was not kept."""
        if self.is_ahead:
            self.end([False])

    def load_states(self, cache: Cache) -> None:
        """Take the states of a cache of transformers, for all rows."""
        rows, layers = range(len(self.lengths)), [each for each in cache.layers if hasattr(each, STATES[0])]
        stateful = [layer for layer in self.states if layer.number_of_states]
        for layer, another in zip(stateful, layers, strict=True):
            layer.replace_states(rows, another, rows, len(rows))

    def mark(self) -> None:
        """Keep the states where the last ones are far behind. The longer the text, the further they are apart."""
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
        for layer in self.states:
            layer.change(lambda state: state[[*rows]])

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
        for layer, another in zip(self.states, other.states, strict=True):
            layer.replace_states(rows, another, sources, len(self.lengths))


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
        return [*map(add, self.cache.lengths, self.given)]

    @property
    def given(self) -> list[int]:
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
        self._chains, given = [tokens[:size] for tokens, size in pairs], self.cache.given
        whole = Tree.chain([before + chain for before, chain in zip(given, self._chains, strict=True)])
        self._width, self._upload = whole.width, None  # that has the tree without the given tokens
        begin = start and len(given[0]) + start
        nodes, is_single = range(start, tree.width), whole.width == 1
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
        """As `Session.read`. Rows of different lengths are read one after another."""
        if self.keeps_beginnings and self.target.device.type == "cpu":  # where longer passes are not faster
            most = EVERY * len(tokens) if most is None else min(most, EVERY * len(tokens))
        groups = group_by_length([*map(add, self.given, map(len, tokens))], self.alike)
        if len(groups) == 1:
            return (yield from super().read(tokens, fuse, most))
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
        self.cache.rewind(row, self.find_beginning(row, length))

    def count_state_bytes(self, row: int) -> int:
        places = [layer.read_row(row) for layer in self.cache.states]
        places += [states for _, mark in self.cache.marks[row] for states in mark]
        return sum(state.nbytes for place in places for state in place.values())

    def _move_now(self) -> None:
        super()._move_now()
        self.cache.forget()


def open_session(target: StockModel, batch: int, layers: Sequence[int] = ()) -> Session:
    """An empty session of a target, without graphs."""
    return (StateSession if target.is_recurrent else Session)(target, batch, layers)


def _take(results: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """The results [B, n, *] at each row's places, of [B, N, *]."""
    first = [*places[0]]
    if any([*row] != first for row in places):
        return results[torch.arange(len(places))[:, None], torch.tensor(places)]
    return results if len(first) == results.shape[1] else results[:, first]
