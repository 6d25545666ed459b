"""One batch while it is decoded: the target's KV cache, and the forward pass over the next tree.

Shapes: B rows, N nodes, T tokens (padded to the longest row), V vocabulary, H hidden size, F = H x captured layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from operator import add
from typing import Any, Protocol

import torch
from torch import Tensor

from decode.devices.transfer import Upload, copy_packed, waits
from decode.kv_cache import KVCache
from decode.models.stock_model import StockModel, capture_features
from decode.recurrent import Replay, States
from decode.trees.masks import tree_masks
from decode.trees.sampling import Sampling
from decode.trees.tree import Tree

LONG_CHAIN = 512  # nodes for which a mask takes longer than hiding later ones


@dataclass(frozen=True)
class Verdict:
    """The target's result for a tree.

    logits [B, N, V]: after each node. features [B, N, F]: hidden states of the nodes; None unless layers were named.
    packed: what `decode.trees.accept.unpack` reads, if the tree was accepted in the same step.
    """

    logits: Tensor
    features: Tensor | None
    packed: Tensor | None = None

    def first(self, rows: int, nodes: int) -> Verdict:
        """The same for the first rows, and of each the first nodes."""
        features = None if self.features is None else self.features[:rows, :nodes]
        return Verdict(self.logits[:rows, :nodes], features, None if self.packed is None else self.packed[:rows])


class Steps(Protocol):
    """What makes the passes of a session on its device, with a KV cache of its own."""

    is_warm: bool  # the last pass took no longer than later ones of its shape

    @property
    def cache(self) -> KVCache: ...

    def verify(self, session: Session, tree: Tree, upload: Upload, sampling: Sampling | None) -> Verdict:
        """The pass over a tree on the device, whose lengths are in the upload. With `sampling` it accepts the tree."""
        ...

    def check(self, session: Session, tree: Tree, roots: Tensor, nodes: int) -> Tree:
        """As `Tree.mend`."""
        ...


class Session:
    """The target's KV cache for one batch: `verify` runs the target over a tree, `keep` commits a path of it.

    layers: the hidden states that verdicts carry as features. steps: makes the passes, if it is given. states: of the
    target's recurrent layers. inputs: what the rows have besides tokens (`decode.hf.call`). keeps_beginnings: whether
    rows with a state can go back to a beginning of their text; others always can.
    """

    keeps_beginnings = False

    def __init__(
        self,
        target: StockModel,
        rows: int,
        layers: Sequence[int] = (),
        *,
        steps: Steps | None = None,
        states: States | None = None,
        inputs: Any = None,
    ) -> None:
        self.target, self.layers, self.steps, self.inputs = target, tuple(layers), steps, inputs
        self._idle_steps = target.idle_steps  # of the model as it is now; a changed one has another list
        self.states = States(rows, target.config) if target.is_recurrent and states is None else states
        part = steps or self.states
        self.cache = KVCache(rows, target.config.num_hidden_layers) if part is None else part.cache
        self._moves: Tensor | None = None  # of the nodes kept last; they are made with the next forward pass
        self._has_moved = False  # the last pass has accepted its trees, and moved their nodes
        self._upload: Upload | None = None
        self._memory: Tensor | None = None  # for the logits of flat passes

    @property
    def lengths(self) -> list[int]:
        """The number of committed tokens of each row."""
        return self.cache.lengths if self.states is None else [*map(add, self.cache.lengths, self.count_given())]

    @property
    def is_warm(self) -> bool:
        """Whether the last pass took no longer than later ones will."""
        return self.steps is None or self.steps.is_warm

    def count_given(self) -> list[int]:
        """How many committed tokens of each row the next pass computes once more; see `decode.recurrent`."""
        return [0] * len(self.cache.lengths) if self.states is None else [*map(len, self.states.given)]

    def open(self, rows: int) -> Session:
        """An empty session for the same target and layers, without graphs."""
        session = Session(self.target, rows, self.layers)
        session.keeps_beginnings = self.keeps_beginnings
        return session

    def begin_upload(self) -> Upload:
        """What the next forward pass needs on the device. Whatever else is added is copied with it."""
        self._upload = Upload(self.target.device)
        self._upload.add({"lengths": torch.tensor(self.cache.lengths)})
        if self._moves is not None:
            self._upload.add({"moves": self._moves})
        return self._upload

    def place(self, tree: Tree) -> Tree:
        """The tree on the target's device."""
        if tree.tokens.device == self.target.device or waits(tree.tokens):
            return tree.to(self.target.device)
        upload, tensors = self._upload or self.begin_upload(), tree.tensors()
        upload.add(tensors)
        return tree.with_tensors({name: upload[name] for name in tensors})

    def check(self, tree: Tree, roots: Tensor, nodes: int) -> Tree:
        """Trees that were made on a GPU, at most `nodes` large, with their faults mended and marked.

        roots [B]: the bonus tokens. See `Tree.mend`.
        """
        if self.steps is not None:
            return self.steps.check(self, tree, roots, nodes)
        return tree.mend(roots, nodes, self.target.vocabulary)

    @torch.no_grad()
    def verify(
        self, tree: Tree, *, start: int = 0, only: Sequence[int] | None = None, sampling: Sampling | None = None
    ) -> Verdict:
        """One forward pass over a tree, after the committed tokens.

        start: compute only the nodes from this one on; those before it were verified by the last call and are still in
        the cache (a tree that grows level by level). only: the nodes to compute logits for, which then are [B, n, V].
        sampling: what all rows sample by, without logits processors; a pass of fixed shape then accepts the tree, too.
        For a target with states, all rows must be equally long for `start`, and have been before.

        Raises ValueError for a tree that is no chain, if the target has states.
        """
        target, states = self.target, self.states
        replay = None if states is None else self._begin_replay(states, tree, start, only)
        if replay is not None:
            tree, start, only = replay.tree, replay.start, replay.only
        count, upload = tree.width - start, self._upload or self.begin_upload()
        tree = self.place(tree)
        if self._moves is not None:
            self.cache.move(upload["moves"])
        self._moves = self._upload = None
        if self.steps is not None:
            assert start == 0 and only is None
            verdict = self.steps.verify(self, tree, upload, sampling)
            self._has_moved = verdict.packed is not None
            return verdict
        unmasked = not (start or target.needs_masks) and self.inputs is None and self._needs_no_mask(tree)
        lengths = self.cache.reserve(start, count, target.device, upload["lengths"], exact=unmasked)
        sees_all = target.sees_texts_whole and self.inputs is None
        seen = None if unmasked else target.backend.count_seen(self.cache.lengths) if sees_all else 0
        inputs = self.make_inputs(tree, start, lengths, seen)
        if target.passes_flat and len(tree.tokens) > 1 and not bool((real := tree.real[:, start:]).all()):
            return self._run_flat(inputs, real, range(count) if only is None else only)
        extra: dict[str, Any] = {} if only is None else {"logits_to_keep": torch.tensor(only, device=target.device)}
        verdict = self.run(inputs | extra)
        if only is not None and verdict.logits.shape[1] != len(only):  # some models ignore `logits_to_keep`
            verdict = replace(verdict, logits=verdict.logits[:, list(only)])
        if states is None or replay is None:
            return verdict
        if not start:
            states.learn()
        return Verdict(*replay.take(verdict.logits, verdict.features))

    def _begin_replay(self, states: States, tree: Tree, start: int, only: Sequence[int] | None) -> Replay:
        """Prepare a pass over chains, whose rows begin with tokens that their states have not seen."""
        if not tree.is_chain:
            raise ValueError(f"{self.target.config.model_type} keeps a recurrent state, so it verifies chains only")
        self._upload = None  # it lacks the given tokens
        if not start:
            states.forget()  # before given tokens are committed
            for row in states.list_behind(only_roots=tree.width == 1):
                self.commit_given(row)
        return states.begin(tree, start, only)

    def commit_given(self, row: int) -> None:
        """Commit the tokens by a pass of their own that a row's states have not seen."""
        states = self.states
        assert states is not None
        inputs = None if self.inputs is None else self.inputs.select([row])
        part = Session(self.target, 1, states=states.view(row), inputs=inputs)
        part.verify(Tree.chain([states.given[row]]), only=[0])
        part.keep([range(len(states.given[row]))])
        assert part.states is not None
        states.take_back(row, part.states)

    def run(self, inputs: dict[str, Any]) -> Verdict:
        """The model's forward pass. It writes to the slots that the cache has reserved."""
        target = self.target
        none: AbstractContextManager[dict[int, Tensor]] = nullcontext({})
        with capture_features(target.model, self.layers) if self.layers else none as captured:
            output = target.run(self.cache, **inputs)
        features = [captured[layer].to(target.device) for layer in self.layers]
        return Verdict(output.logits.to(target.device), torch.cat(features, dim=-1) if features else None)

    def _run_flat(self, inputs: dict[str, Any], real: Tensor, only: Sequence[int]) -> Verdict:
        """`run` for the nodes `real` [B, N] as one row of T tokens, without padding.

        The logits of padding are those of an earlier pass: filling them would take as long as a token.
        """
        target, wanted = self.target, torch.zeros_like(real)
        wanted[:, [*only]] = real[:, [*only]]
        keep = wanted[real].nonzero()[:, 0]  # places among the T tokens
        inputs = {name: _flatten(each, real) for name, each in inputs.items()}
        self.cache.reserve_flat(real)
        with capture_features(target.model, self.layers) as captured:
            logits = target.run(self.cache, real.sum(dim=1), **inputs, logits_to_keep=keep).logits[0]
        size = len(real) * len(only) * logits.shape[-1]
        if self._memory is None or self._memory.numel() < size:  # new memory takes as long as the pass
            self._memory = logits.new_zeros(size)
        padded = self._memory[:size].view(len(real), len(only), -1)
        padded[wanted[:, [*only]]] = logits if len(logits) == len(keep) else logits[keep]
        if not self.layers:
            return Verdict(padded, None)
        found = torch.cat([captured[layer][0] for layer in self.layers], dim=-1)  # [T, F]
        features = found.new_zeros(*real.shape, found.shape[1])
        features[real] = found
        return Verdict(padded, features)

    def make_inputs(self, tree: Tree, start: int, lengths: Tensor, seen: int | None) -> dict[str, Any]:
        """The model's inputs for the nodes from `start` on, after `lengths` [B] committed tokens.

        seen: the slots that all nodes see, if that is faster without a mask; None: there is no mask at all.
        """
        target, depth = self.target, tree.depth[:, start:]
        positions = (lengths[:, None] + depth).clamp(max=target.context - 1)
        masks: Any = None
        if seen is not None:
            ancestors = None if tree.is_chain else tree.ancestors[:, start:]
            depth = depth if tree.is_chain else tree.depth
            masks = tree_masks(target.facts.windows, lengths, ancestors, depth, self.cache.used, target.dtype, seen)
        elif any(self.cache.lengths):  # see `decode.devices.attention`
            masks = torch.empty(*tree.tokens.shape, 0, dtype=target.dtype, device=lengths.device)[:, None]
            masks = dict.fromkeys(target.facts.windows, masks) if len(target.facts.windows) > 1 else masks
        if self.states is not None and isinstance(masks, dict):
            masks |= dict.fromkeys(("linear_attention", "conv"))  # padding comes last
        inputs = {"input_ids": tree.tokens[:, start:], "attention_mask": masks, "position_ids": positions}
        if not target.facts.takes_positions:  # there are no attention layers
            inputs = {"input_ids": inputs["input_ids"], "attention_mask": None}
        return inputs if self.inputs is None else self.inputs.rewrite(inputs, self, lengths, tree.depth[:, start:])

    def _needs_no_mask(self, tree: Tree) -> bool:
        """Whether the nodes are the next tokens of all rows, and the model hides later ones itself, and faster.

        Without committed tokens, it would not hide unused slots from a single node.
        """
        target, width, lengths = self.target, tree.width, self.cache.lengths
        if not tree.is_chain:
            return False
        if not any(lengths):
            return width > 1
        is_alike = min(lengths) == max(lengths) and target.facts.sees_all
        is_faster = width == 1 or width >= LONG_CHAIN or bool(target.backend.count_seen(lengths))
        return target.sees_texts_whole and is_alike and is_faster

    def keep(self, path: Sequence[Sequence[int]]) -> None:
        """Commit the nodes of each row's path, root first, and forget the rest of the tree."""
        if self.states is not None:
            return self.states.keep(path, self.keeps_beginnings)
        if not self._has_moved:
            if self._moves is not None:
                self.settle()
            self._moves = self.cache.plan_moves(path)
        self._upload, self._has_moved = None, False
        self.cache.commit([len(row) for row in path])

    def add_rows(self, count: int) -> None:
        """Add empty rows after the others."""
        self.settle()
        self.cache.add_rows(count)
        if self.states is not None:
            self.states.add_rows(count)

    def replace(self, rows: Sequence[int], other: Session, sources: Sequence[int]) -> None:
        """Replace these rows by what is committed in the rows `sources` of another session."""
        self.settle()
        other.settle()
        self.cache.replace(rows, other.cache, sources)
        if self.states is not None and other.states is not None:
            self.states.replace(rows, other.states, sources)

    def join(self, other: Session, sources: Sequence[int]) -> None:
        """Add rows after the others, with what is committed in the rows `sources` of another session."""
        begin = len(self.cache.lengths)
        self.add_rows(len(sources))
        self.replace(range(begin, begin + len(sources)), other, sources)
        if other.inputs is not None:
            more = other.inputs.select(sources)
            self.inputs = more if self.inputs is None else self.inputs.join(more)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order: `rows[i] >= i`. Nodes that were not kept are lost."""
        self.settle()
        self.cache.select(rows)
        if self.states is not None:
            self.states.select(rows)
        self.inputs = self.inputs and self.inputs.select(rows)

    def find_beginning(self, row: int, length: int) -> int:
        """The most tokens of a row that it can go back to, `length` at most."""
        return min(length, self.cache.lengths[row]) if self.states is None else self.states.find_beginning(row, length)

    def rewind(self, row: int, length: int) -> None:
        """Go back to the first tokens of a row, as many as `find_beginning` finds."""
        length = self.find_beginning(row, length)
        if self.states is None:
            self.cache.lengths[row] = length
        else:
            self.states.forget()
            self.states.rewind(row, length)

    def copy_from(self, other: Session, row: int, source: int, length: int) -> None:
        """Replace an empty row by the first `length` tokens of another session's row `source`."""
        self.replace([row], other, [source])
        self.rewind(row, length)

    def count_state_bytes(self, row: int) -> int:
        """The bytes of a row beyond its keys and values."""
        return 0 if self.states is None else self.states.count_bytes(row)

    def close(self) -> None:
        """The rows that are left have ended. The next session may take the steps."""
        if self.steps is not None:
            self._idle_steps[:] = [self.steps]

    @torch.inference_mode()  # the cache may have been made in it
    def clear_free_slots(self) -> None:
        """Zero all slots beyond the committed tokens: 0 times a NaN in a hidden slot would be NaN."""
        self.settle()
        self.cache.clear_free_slots()

    @torch.inference_mode()  # the cache may have been made in it
    def settle(self) -> None:
        """Move the nodes kept last, and forget those that were not."""
        if self._moves is not None:
            self.cache.move(copy_packed({"moves": self._moves}, self.target.device)["moves"])
        self._moves = self._upload = None
        if self.states is not None:
            self.states.forget()


def _flatten(inputs: Any, real: Tensor) -> Any:
    """An input [B, N, ...] of the nodes `real` as [1, T, ...]; masks [B, 1, N, S], or a dict, as [1, 1, T, S]."""
    if isinstance(inputs, dict):
        return {name: _flatten(each, real) for name, each in inputs.items()}
    return inputs[:, 0][real][None, None] if inputs.dim() == 4 else inputs[real][None]
