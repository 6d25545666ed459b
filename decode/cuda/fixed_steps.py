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
from weakref import ref

import torch
from torch import Tensor, nn

from decode.cuda.graph import tell_fault
from decode.devices.graph import MOST_KEPT, Captured, forget_oldest, round_up
from decode.devices.transfer import Upload
from decode.kv_cache import KVCache
from decode.models.stock_model import StockModel
from decode.session import Session, Verdict
from decode.trees.accept import accept_at_once, choose_streams, pack
from decode.trees.noise import KEY_NAMES
from decode.trees.sampling import Sampling
from decode.trees.tree import Tree

OPTIONAL = ("q", "wrong")  # tensors that only some trees have


class FixedSteps:
    """The steps of a session: their KV cache, with more rows than needed, and their graphs.

    Prompts are read by sessions of their own, whose keys and values are copied. Attention sees all slots, or the
    window that `Backend.find_window` finds. Checks have a pool of their own, so that no step overwrites a checked tree.
    """

    def __init__(self, target: StockModel, rows: int, layers: Sequence[int]) -> None:
        self.cache = KVCache(rows, target.config.num_hidden_layers, round_up)
        self.layers, self._backend = tuple(layers), target.backend
        self.pool, self.check_pool = self._backend.make_pool(), self._backend.make_pool()
        self.checks: dict[Hashable, Captured[dict[str, Tensor]]] = {}
        self._graphs: dict[Hashable, Captured[Verdict]] = {}
        self.is_warm = False
        self._states: list[ref[Tensor]] = []  # of the KV cache that the graphs use

    @property
    def graphs(self) -> dict[Hashable, Captured[Verdict]]:
        """Those of steps on the KV cache where it is now."""
        states = self.cache.states
        if len(states) != len(self._states) or any(
            known() is not now for known, now in zip(self._states, states, strict=True)
        ):
            self._graphs.clear()
            self.checks.clear()
            # torch refuses a pool whose graphs are all gone.
            self.pool, self.check_pool = self._backend.make_pool(), self._backend.make_pool()
            self._states = [*map(ref, states)]
        return self._graphs

    def verify(self, session: Session, tree: Tree, upload: Upload, sampling: Sampling | None) -> Verdict:
        """The result for whole trees. With `sampling` they are accepted in the same step."""
        inputs = list_inputs(tree, upload, sampling)
        rows, nodes = map(round_up, tree.tokens.shape)
        self.cache.grow(max(self.cache.lengths) + nodes)  # keys and values move in memory only if that takes more
        seen, self.cache.used = 0, self.cache.capacity
        if session.target.sees_texts_whole:
            seen, self.cache.used = self._backend.find_window(self.cache.lengths, self.cache.capacity, nodes)
        graphs, kind, levels = self.graphs, sampling and sampling.kind, round_up(tree.height + 1)
        window = seen, self.cache.used
        key = rows, nodes, levels, kind, window, *((name, tensor.dtype) for name, tensor in inputs.items())
        if key not in graphs:
            forget_oldest(graphs)
            buffers = {name: make_buffer(name, tensor, rows, nodes) for name, tensor in inputs.items()}
            graphs[key] = Captured(self.pool, buffers)
        self.is_warm = graphs[key].is_warm
        verdict = graphs[key].run(partial(compute_step, session, levels=levels, kind=kind, seen=seen), inputs)
        if self.pool is not None and self.pool.fault is not None:
            session.target.has_graphs = False  # the next batch's session pads nothing
        return verdict.first(*tree.tokens.shape)

    def check(self, session: Session, tree: Tree, roots: Tensor, nodes: int) -> Tree:
        """See `Tree.mend`."""
        rows, width = map(round_up, tree.tokens.shape)
        parents = nn.functional.pad(tree.parents, (0, width - tree.width), value=-1)  # a node's would be a fault
        inputs = {"tokens": tree.tokens, "parents": parents, "sizes": tree.sizes, "roots": roots}
        key, checks = (rows, width, tree.height, tree.is_chain, nodes), self.checks
        if key not in checks:
            forget_oldest(checks)
            buffers = {name: make_buffer(name, tensor, rows, width) for name, tensor in inputs.items()}
            checks[key] = Captured(self.check_pool, buffers)
        height, is_chain, vocabulary = tree.height, tree.is_chain, session.target.vocabulary

        def compute(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
            given = Tree(buffers["tokens"], buffers["parents"], buffers["sizes"], height, is_chain=is_chain)
            return given.mend(buffers["roots"], nodes, vocabulary).tensors()

        checked = checks[key].run(compute, inputs)
        whole = slice(len(roots)), slice(tree.width), slice(tree.width)
        return tree.with_tensors({name: tensor[whole[: tensor.dim()]] for name, tensor in checked.items()})


def list_inputs(tree: Tree, upload: Upload, sampling: Sampling | None) -> dict[str, Tensor]:
    """What differs from step to step, by name: the tree, the lengths and the noise."""
    names = ["tokens", "sizes", *([] if tree.is_chain else ["parents", "ancestors"])]
    names += [name for name in OPTIONAL if getattr(tree, name) is not None]
    inputs = {"lengths": upload["lengths"]} | {name: getattr(tree, name) for name in names}
    for name in [KEY_NAMES[stream] for stream in choose_streams(tree, sampling)] if sampling is not None else ():
        inputs[name] = upload[name][:, : tree.width]
    return inputs


def compute_step(
    session: Session, buffers: Mapping[str, Tensor], *, levels: int, kind: Sampling | None, seen: int
) -> Verdict:
    """A step on the padded tensors of `list_inputs`. Tensor operations only; all shapes are those of the buffers.

    levels: of trees at most, the root's included. kind: how trees are accepted. Accepted nodes are then moved at once,
    to where `keep` counts them as committed. seen: slots that all nodes see without a mask.
    """
    tree, lengths = make_tree(buffers, levels), buffers["lengths"]
    session.cache.place(lengths, 0, tree.width)
    verdict = session.run(session.make_inputs(tree, 0, lengths, seen))
    if kind is None:
        return verdict
    on_path, bonus = accept_at_once(tree, verdict.logits, kind, buffers)
    if not tree.is_chain:
        compact(session.cache, on_path)
    return replace(verdict, packed=pack(tree, on_path, bonus))


def compact(cache: KVCache, on_path: Tensor) -> None:
    """Move the nodes on each row's path, [B, N] bool, to the row's first node slots."""
    node = torch.arange(on_path.shape[1], device=on_path.device)
    path = on_path.int().sort(dim=1, descending=True, stable=True).indices
    source = torch.where(node < on_path.sum(dim=1, keepdim=True), path, node)  # [B, N]
    cache.move(torch.stack([cache.node_slots.gather(1, source), cache.node_slots]))


@torch.inference_mode()  # as in the loop
def find_graph_fault(target: StockModel) -> str | None:
    """Why steps of the model cannot be graphs; None if they can. It captures the graph of a small one."""
    if target.is_recurrent:
        return "it keeps a recurrent state"
    steps = FixedSteps(target, 1, ())
    session = Session(target, 1, steps=steps)
    try:
        for _ in range(3):  # the first allocates the KV cache, the second is the first with it, the third is captured
            session.verify(Tree.chain([[0]]))
    except Exception as error:  # anything from the model's code, in steps of fixed shape
        return tell_fault(error)
    return None if steps.pool is None else steps.pool.fault


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


def open_steps(target: StockModel, rows: int, layers: Sequence[int]) -> FixedSteps:
    """Steps for a session: those of the last one that ended, with their memory and graphs, if they fit."""
    try:
        steps: FixedSteps = target.idle_steps.pop()  # at once: other threads may use the same target
    except IndexError:
        return FixedSteps(target, rows, layers)
    if steps.layers != tuple(layers) or steps.cache.capacity > MOST_KEPT:
        return FixedSteps(target, rows, layers)
    steps.cache.restart(rows)
    return steps
