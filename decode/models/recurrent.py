"""Targets with a recurrent state: linear-attention, state-space and convolution layers, alone or between attention.

Such a state can neither branch nor be rolled back, but it can be kept. So trees are chains, and a pass begins with a
copy of the state. If all nodes of the chain are accepted, the state after the pass is the committed one. Else the copy
comes back, and the accepted tokens are given once more at the beginning of the next chain. No model code is touched.

Rows are verified one after another: a state has no room for padding, and rows accept different lengths.
Shapes: B rows, N nodes, V vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from decode.kv_cache import TreeCache, TreeCacheLayer
from decode.models.stock_model import StockModel
from decode.sampling import Sampling
from decode.session import Fuse, Read, Session, Verdict, run_through
from decode.tree import Tree

STATES = (  # of a layer: dicts by the number of the state
    "conv_states",
    "recurrent_states",
    "has_previous_state",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "conv_kernel_size",
)


class StateLayer(LinearAttentionLayer):
    """The states of one layer and row, and a copy of them."""

    dtype: Any
    device: Any
    is_initialized = False  # it has no keys and values

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.save()

    def save(self) -> None:
        """Copy the states. A pass writes to them in place."""
        self._saved = {name: _copy(getattr(self, name)) for name in STATES}

    def restore(self) -> None:
        """Go back to the copy."""
        for name, saved in self._saved.items():
            setattr(self, name, _copy(saved))

    def copy_from(self, other: StateLayer) -> None:
        """Take the states of another row's layer."""
        self._saved = {name: _copy(getattr(other, name)) for name in STATES}
        self.restore()
        self.dtype, self.device = other.dtype, other.device


class StateAndAttentionLayer(StateLayer, TreeCacheLayer):
    """A layer with both a state, and keys and values."""

    def __init__(self, cache: TreeCache, number_of_states: int) -> None:
        TreeCacheLayer.__init__(self, cache)
        StateLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """transformers names the arguments of states only."""
        (TreeCacheLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)


def _copy(states: dict[int, Any]) -> dict[int, Any]:
    return {number: state.clone() if isinstance(state, Tensor) else state for number, state in states.items()}


class StateCache(TreeCache):
    """The KV cache and the states of one row."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(1, config.num_hidden_layers)
        self.layers = [self._make(layer) for layer in DynamicCache(config=config).layers]
        self.states = [layer for layer in self.layers if isinstance(layer, StateLayer)]
        self._is_ahead = False  # a pass has changed the states, and was not kept

    def _make(self, layer: Any) -> Any:
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            return self._make_layer() if hasattr(layer, "is_sliding") else layer  # a layer without a cache
        number = layer.number_of_states
        return StateAndAttentionLayer(self, number) if hasattr(layer, "is_sliding") else StateLayer(number)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Also of models without attention layers."""
        return self.lengths[0]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.used, 0

    def begin(self) -> None:
        """Prepare a pass after what is committed."""
        for layer in self.states:
            layer.restore() if self._is_ahead else layer.save()
        self._is_ahead = True

    def end(self, is_kept: bool) -> None:
        """Commit what the last pass made of the states, or go back."""
        if not is_kept:
            for layer in self.states:
                layer.restore()
        self._is_ahead = False

    def copy_from(self, other: StateCache) -> None:
        """Take the row of another cache."""
        self.replace([0], other)
        for layer, source in zip(self.states, other.states, strict=True):
            layer.copy_from(source)


class StateRow(Session):
    """A session of one row. given: committed tokens that the state has not seen."""

    cache: StateCache

    def __init__(self, target: StockModel, layers: Sequence[int] = ()) -> None:
        super().__init__(target, 1, layers)
        self.cache, self.given, self._chain = StateCache(target.config), list[int](), list[int]()

    def verify(
        self, tree: Tree, *, start: int = 0, only: Sequence[int] | None = None, sampling: Sampling | None = None
    ) -> Verdict:
        """As `Session.verify`, for a chain. `start` saves no time."""
        self.cache.begin()
        self._chain = tree.tokens[0, : int(tree.sizes[0])].tolist()
        skipped = len(self.given)
        places = None if only is None else [skipped + start + node for node in only]
        verdict = super().verify(Tree.chain([[*self.given, *self._chain]]), only=places)
        features = None if verdict.features is None else verdict.features[:, skipped + start :]
        return Verdict(verdict.logits if only is not None else verdict.logits[:, skipped + start :], features)

    def _model_inputs(self, tree: Tree, start: int, lengths: Tensor) -> dict[str, Any]:
        inputs = super()._model_inputs(tree, start, lengths)
        if isinstance(inputs["attention_mask"], dict):
            inputs["attention_mask"] |= dict.fromkeys(("linear_attention", "conv"))  # there is no padding
        if not self.target.takes_positions:  # there are no attention layers
            inputs["attention_mask"] = None
            del inputs["position_ids"]
        return inputs

    def keep(self, path: Sequence[Sequence[int]]) -> None:
        accepted = self._chain[: len(path[0])]
        is_kept = len(accepted) == len(self._chain)
        self.cache.end(is_kept)
        self.given += accepted
        if is_kept:
            self.cache.commit([len(self.given)])
            self.given = []

    def copy(self) -> StateRow:
        """The same row again."""
        row = StateRow(self.target, self.layers)
        row.cache.copy_from(self.cache)
        row.given = [*self.given]
        return row


class StateSession(Session):
    """A session for a target with a recurrent state."""

    def __init__(self, target: StockModel, batch: int, layers: Sequence[int] = ()) -> None:
        super().__init__(target, 0, layers)
        self.rows = [StateRow(target, layers) for _ in range(batch)]

    @property
    def lengths(self) -> list[int]:
        return [row.cache.lengths[0] + len(row.given) for row in self.rows]

    @property
    def caches(self) -> list[TreeCache]:
        return [row.cache for row in self.rows]

    def verify(
        self, tree: Tree, *, start: int = 0, only: Sequence[int] | None = None, sampling: Sampling | None = None
    ) -> Verdict:
        if not tree.is_chain:
            raise ValueError(f"{self.target.config.model_type} keeps a recurrent state, so it verifies chains only")
        self._upload, tree = None, tree.to(torch.device("cpu"))
        sizes, nodes = tree.sizes.tolist(), range(tree.width - start) if only is None else only
        found = [
            row.verify(tree.select([number]), start=start, only=[node for node in nodes if start + node < size])
            for number, (row, size) in enumerate(zip(self.rows, sizes, strict=True))
            if size > start
        ]
        logits = found[0].logits.new_zeros(len(self.rows), len(nodes), found[0].logits.shape[-1])
        features = None
        if self.layers:
            each = found[0].features
            assert each is not None
            features = each.new_zeros(len(self.rows), tree.width - start, each.shape[-1])
        numbers = (number for number, size in enumerate(sizes) if size > start)
        for number, verdict in zip(numbers, found, strict=True):
            places = [place for place, node in enumerate(nodes) if start + node < sizes[number]]
            logits[number, places] = verdict.logits[0]
            if features is not None and verdict.features is not None:
                features[number, : verdict.features.shape[1]] = verdict.features[0]
        return Verdict(logits, features)

    def keep(self, path: Sequence[Sequence[int]]) -> None:
        self._upload = None
        for row, nodes in zip(self.rows, path, strict=True):
            if nodes:
                row.keep([nodes])

    def extend(self, tokens: Sequence[Sequence[int]], fuse: Fuse | None = None) -> Read:
        return run_through(self.read(tokens, fuse))

    def read(
        self, tokens: Sequence[Sequence[int]], fuse: Fuse | None = None, most: int | None = None
    ) -> Generator[None, None, Read]:
        read = []
        for row, part in zip(self.rows, tokens, strict=True):
            read.append((yield from super(StateRow, row).read([part], fuse, most)))
        logits = torch.cat([each for each, _ in read])
        found = [features[0] for _, features in read if features is not None]
        return logits, pad_sequence(found, batch_first=True) if found else None

    def renew(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], fuse: Fuse | None = None) -> Read:
        session = StateSession(self.target, len(rows), self.layers)
        read = session.extend(tokens, fuse)
        for row, renewed in zip(rows, session.rows, strict=True):
            self.rows[row] = renewed
        return read

    def add_rows(self, count: int) -> None:
        self.rows += [StateRow(self.target, self.layers) for _ in range(count)]

    def join(self, other: Session, sources: Sequence[int]) -> None:
        assert isinstance(other, StateSession)
        self.rows += [other.rows[source].copy() for source in sources]

    def select(self, rows: Sequence[int]) -> None:
        self._upload, self.rows = None, [self.rows[row] for row in rows]

    def clear_free_slots(self) -> None:
        for row in self.rows:
            row.clear_free_slots()
