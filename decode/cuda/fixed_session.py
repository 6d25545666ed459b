"""Steps of fixed shape: forward pass, acceptance and moves in the KV cache, all on the device and captured as a graph.

A step reads its numbers from buffers, so that all steps of a bucket launch the same kernels on the same memory. Rows
and nodes are padded to powers of two. Padding keeps values of earlier steps. Nothing attends to it, and it is never
accepted. Where rows sample in different ways or by logits processors, a step is the forward pass alone.

Shapes: B rows, N nodes, both padded; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from weakref import finalize, ref

import torch
from torch import Tensor, nn

from decode.cuda.graph import tell_fault
from decode.devices.graph import MOST_KEPT, Captured, forget_oldest, round_up
from decode.kv_cache import TreeCache
from decode.models.grouped_attention import find_window
from decode.models.stock_model import StockModel
from decode.session import Fuse, Read, Session, Verdict
from decode.trees.accept import pack
from decode.trees.at_once import accept_at_once, choose_streams
from decode.trees.noise import KEY_NAMES
from decode.trees.sampling import Sampling
from decode.trees.tree import Tree

OPTIONAL = ("q", "wrong")  # tensors that only some trees have


class FixedCache(TreeCache):
    """A `TreeCache` with more rows than needed, whose slots are chosen on the device. Attention sees all of them."""

    @torch.inference_mode()  # the cache was made in it
    def restart(self, batch: int) -> None:
        """Forget all tokens. Memory stays where it is, and is cleared: 0 times a NaN in a hidden slot would be NaN."""
        self.lengths = []
        for block in self.blocks:
            block.clear()
        self.add_rows(batch)

    def round_rows(self, rows: int) -> int:
        return round_up(rows)

    def make_room(self, nodes: int, gains: bool = False) -> int:
        """Allocate slots for so many nodes of each row. Keys and values move in memory only if that takes more.

        Returns how many slots all nodes see without a mask. gains: see `find_window`.
        """
        self.grow(max(self.lengths) + nodes)
        seen, self.used = find_window(self.lengths, self.capacity, nodes, gains)
        return seen

    def place(self, lengths: Tensor, nodes: int) -> None:
        """Reserve the slots of so many nodes after the committed tokens, `lengths` [B]."""
        self.slots = self.node_slots = lengths[:, None] + torch.arange(nodes, device=lengths.device)
        self._node_rows = None

    @property
    def states(self) -> list[Tensor]:
        """The keys and values of all blocks: others once they have moved in memory."""
        return [states for block in self.blocks for states in (block.keys, block.values)]

    def compact(self, on_path: Tensor) -> None:
        """Move the nodes on each row's path, [B, N] bool, to the row's first node slots."""
        node = torch.arange(on_path.shape[1], device=on_path.device)
        path = on_path.int().sort(dim=1, descending=True, stable=True).indices
        source = torch.where(node < on_path.sum(dim=1, keepdim=True), path, node)  # [B, N]
        self.move(torch.stack([self.node_slots.gather(1, source), self.node_slots]))


class StepMemory:
    """What the graphs of a batch's steps read and write, and these graphs.

    Checks have a pool of their own, so that no step overwrites a checked tree.
    """

    def __init__(self, target: StockModel, batch: int) -> None:
        self.cache, self._backend = FixedCache(batch, target.config.num_hidden_layers), target.backend
        self.pool, self.check_pool = self._backend.make_pool(), self._backend.make_pool()
        self.checks: dict[Hashable, Captured[dict[str, Tensor]]] = {}
        self._steps: dict[Hashable, Captured[Verdict]] = {}
        self._states: list[ref[Tensor]] = []  # of the KV cache that the steps use

    @property
    def steps(self) -> dict[Hashable, Captured[Verdict]]:
        """The graphs of steps on the KV cache where it is now."""
        states = self.cache.states
        if len(states) != len(self._states) or any(
            known() is not now for known, now in zip(self._states, states, strict=True)
        ):
            self._steps.clear()
            self.checks.clear()
            # torch refuses a pool whose graphs are all gone.
            self.pool, self.check_pool = self._backend.make_pool(), self._backend.make_pool()
            self._states = [*map(ref, states)]
        return self._steps


class FixedSession(Session):
    """A `Session` whose steps have a fixed shape and, where they are told how rows sample, also accept their trees.

    Prompts are read by sessions of their own, whose keys and values are copied. memory: of an earlier session for the
    same layers.
    """

    cache: FixedCache

    def __init__(self, target: StockModel, batch: int, layers: Sequence[int], memory: StepMemory | None = None) -> None:
        super().__init__(target, batch, layers)
        self.memory = memory or StepMemory(target, batch)
        self.cache = self.memory.cache
        self.cache.restart(batch)
        self._has_moved = False  # the last step accepted its trees
        self._seen = 0  # slots that all nodes of the step see without a mask

    def extend(self, tokens: Sequence[Sequence[int]], fuse: Fuse | None = None) -> Read:
        """`Session.extend` for empty rows."""
        return self.renew(range(len(tokens)), tokens, fuse)

    @torch.no_grad()
    def verify(
        self, tree: Tree, *, start: int = 0, only: Sequence[int] | None = None, sampling: Sampling | None = None
    ) -> Verdict:
        """The result for whole trees. With `sampling` they are accepted in the same step."""
        assert start == 0 and only is None
        inputs = self._list_inputs(tree, sampling)
        rows, nodes = map(round_up, inputs["tokens"].shape)
        self._seen = self.cache.make_room(nodes, self.target.sees_texts_whole)
        steps, kind = self.memory.steps, sampling and sampling.kind
        levels, window = round_up(tree.height + 1), (self._seen, self.cache.used)
        key = rows, nodes, levels, kind, window, *((name, tensor.dtype) for name, tensor in inputs.items())
        if key not in steps:
            forget_oldest(steps)
            buffers = {name: make_buffer(name, tensor, rows, nodes) for name, tensor in inputs.items()}
            steps[key] = Captured(self.memory.pool, buffers)
        self._has_moved = kind is not None
        verdict = steps[key].run(partial(self.compute, levels=levels, kind=kind), inputs)
        if self.memory.pool is not None and self.memory.pool.fault is not None:
            self.target.has_graphs = False  # the next batch's session pads nothing
        return verdict.first(*tree.tokens.shape)

    def _needs_no_mask(self, tree: Tree, start: int) -> bool:
        return False

    def _count_seen(self) -> int:
        return self._seen

    def check(self, tree: Tree, roots: Tensor, nodes: int) -> Tree:
        rows, width = map(round_up, tree.tokens.shape)
        parents = nn.functional.pad(tree.parents, (0, width - tree.width), value=-1)  # a node's would be a fault
        inputs = {"tokens": tree.tokens, "parents": parents, "sizes": tree.sizes, "roots": roots}
        key, checks = (rows, width, tree.height, tree.is_chain, nodes), self.memory.checks
        if key not in checks:
            forget_oldest(checks)
            buffers = {name: make_buffer(name, tensor, rows, width) for name, tensor in inputs.items()}
            checks[key] = Captured(self.memory.check_pool, buffers)
        compute = partial(self.compute_check, height=tree.height, is_chain=tree.is_chain, nodes=nodes)
        checked = checks[key].run(compute, inputs)
        whole = slice(len(roots)), slice(tree.width), slice(tree.width)
        return tree.with_tensors({name: tensor[whole[: tensor.dim()]] for name, tensor in checked.items()})

    def compute_check(
        self, buffers: Mapping[str, Tensor], *, height: int, is_chain: bool, nodes: int
    ) -> dict[str, Tensor]:
        """The tensors of checked trees, by name."""
        given = Tree(buffers["tokens"], buffers["parents"], buffers["sizes"], height, is_chain=is_chain)
        return super().check(given, buffers["roots"], nodes).tensors()

    def _list_inputs(self, tree: Tree, sampling: Sampling | None) -> dict[str, Tensor]:
        """What differs from step to step, by name: the tree, the lengths and the noise."""
        upload = self._upload or self.begin_upload()
        tree = self.place(tree)
        if self._moves is not None:
            self.cache.move(upload["moves"])
        self._moves = self._upload = None
        names = ["tokens", "sizes", *([] if tree.is_chain else ["parents", "ancestors"])]
        names += [name for name in OPTIONAL if getattr(tree, name) is not None]
        inputs = {"lengths": upload["lengths"]} | {name: getattr(tree, name) for name in names}
        for name in [KEY_NAMES[stream] for stream in choose_streams(tree, sampling)] if sampling is not None else ():
            inputs[name] = upload[name][:, : tree.width]
        return inputs

    def compute(self, buffers: Mapping[str, Tensor], levels: int, kind: Sampling | None) -> Verdict:
        """A step on the padded tensors of `_list_inputs`. Tensor operations only; all shapes are those of the buffers.

        levels: of trees at most, the root's included. kind: how trees are accepted. Accepted nodes are then moved at
        once, to where `keep` counts them as committed.
        """
        tree, lengths = make_tree(buffers, levels), buffers["lengths"]
        self.cache.place(lengths, tree.width)
        verdict = self._run_model(tree, 0, lengths)
        if kind is None:
            return verdict
        on_path, bonus = accept_at_once(tree, verdict.logits, kind, buffers)
        if not tree.is_chain:
            self.cache.compact(on_path)
        return replace(verdict, packed=pack(tree.tokens, tree.sizes, tree.wrong, on_path, bonus))

    def keep(self, path: Sequence[Sequence[int]]) -> None:
        """Count the nodes of each row's path as committed. A step that accepted them has moved them."""
        if not self._has_moved:
            return super().keep(path)
        self._upload = None
        self.cache.commit([len(row) for row in path])


@torch.inference_mode()  # as in the loop
def find_graph_fault(target: StockModel) -> str | None:
    """Why steps of the model cannot be graphs; None if they can. It captures the graph of a small one."""
    if target.is_recurrent:
        return "it keeps a recurrent state"
    session = FixedSession(target, 1, ())
    try:
        for _ in range(3):  # the first allocates the KV cache, the second is the first with it, the third is captured
            session.verify(Tree.chain([[0]]))
    except Exception as error:  # anything from the model's code, in steps of fixed shape
        return tell_fault(error)
    pool = session.memory.pool
    return None if pool is None else pool.fault


def make_buffer(name: str, like: Tensor, rows: int, nodes: int) -> Tensor:
    """A buffer for an input of a step, filled with trees of one node each."""
    if name == "ancestors":
        return torch.eye(nodes, dtype=like.dtype, device=like.device).repeat(rows, 1, 1)
    shape = (rows, nodes, like.shape[-1])[: like.ndim]
    return like.new_full(shape, {"sizes": 1, "parents": -1}.get(name, 0))


def make_tree(buffers: Mapping[str, Tensor], levels: int) -> Tree:
    """The padded trees of a step. What a tree computes from its tensors is computed anew in each step."""
    tokens, sizes = buffers["tokens"], buffers["sizes"]
    if "parents" in buffers:
        tree = Tree(tokens, buffers["parents"], sizes, height=min(levels, tokens.shape[1]) - 1)
    else:
        tree = Tree.chain_of(tokens, sizes)
    return tree.with_tensors({name: buffers[name] for name in ("ancestors", *OPTIONAL) if name in buffers})


class FixedSessions:
    """Opens the sessions of one target. If it can, each takes the memory and the graphs of the last one that ended."""

    def __init__(self) -> None:
        self._idle: list[tuple[Hashable, StepMemory]] = []  # one at most, but for threads that end at the same time

    def open(self, target: StockModel, batch: int, layers: Sequence[int]) -> FixedSession:
        try:
            known, memory = self._idle.pop()  # at once: other threads may use the same target
        except IndexError:
            known, memory = None, None
        fits = memory is not None and known == tuple(layers) and memory.cache.capacity <= MOST_KEPT
        session = FixedSession(target, batch, layers, memory if fits else None)
        finalize(session, self._take_back, tuple(layers), session.memory).atexit = False
        return session

    def _take_back(self, layers: Hashable, memory: StepMemory) -> None:
        self._idle[:] = [(layers, memory)]
