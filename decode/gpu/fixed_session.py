"""Steps of fixed shape: forward pass, acceptance and moves in the KV cache, all on the device and captured as a graph.

A step reads its numbers from buffers, so that all steps of a bucket launch the same kernels on the same memory. Rows
and nodes are padded to powers of two. Padding keeps values of earlier steps. Nothing attends to it, and it is never
accepted.

Shapes: B rows, N nodes, both padded; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from decode.accept import pack
from decode.gpu.at_once import accept_at_once, choose_stream
from decode.gpu.fixed_cache import FixedCache, round_up
from decode.gpu.graph import Captured, GraphPool
from decode.models.stock_model import StockModel
from decode.noise import KEY_NAMES
from decode.sampling import Sampling
from decode.session import Fuse, Session, Verdict
from decode.tree import Tree

OPTIONAL = ("q", "sampled", "wrong")  # tensors that only some trees have


class FixedSession(Session):
    """A `Session` whose steps have a fixed shape and also accept their trees. For sampling without processors.

    Prompts are read by sessions of their own, whose keys and values are copied.
    """

    cache: FixedCache

    def __init__(self, target: StockModel, batch: int, layers: Sequence[int], sampling: Sampling) -> None:
        super().__init__(target, batch, layers)
        self.cache, self.sampling = FixedCache(batch), sampling
        self._steps: dict[Hashable, FixedStep] = {}
        self._pool = GraphPool(target.device) if target.device.type == "cuda" else None
        self._allocated = (0, 0)  # rows and slots, for which the steps were made

    def extend(self, tokens: Sequence[Sequence[int]], fuse: Fuse | None = None) -> tuple[Tensor, Tensor | None]:
        """`Session.extend` for empty rows."""
        return self.renew(range(len(tokens)), tokens, fuse)

    @torch.no_grad()
    def verify(self, tree: Tree, *, start: int = 0, only: Sequence[int] | None = None) -> Verdict:
        """The result for whole trees, which are accepted in the same step."""
        assert start == 0 and only is None
        inputs = self._list_inputs(tree)
        rows, nodes = map(round_up, inputs["tokens"].shape)
        self.cache.make_room(nodes)
        if self._allocated != (rows, self.cache.capacity):
            self._steps.clear()
            self._allocated = rows, self.cache.capacity
        key = nodes, *((name, tensor.dtype) for name, tensor in inputs.items())
        if key not in self._steps:
            buffers = {name: make_buffer(name, tensor, rows, nodes) for name, tensor in inputs.items()}
            self._steps[key] = FixedStep(buffers, Captured(self._pool))
        return self._steps[key].run(self.compute, inputs)

    def _list_inputs(self, tree: Tree) -> dict[str, Tensor]:
        """What differs from step to step, by name: the tree, the lengths and the noise."""
        upload = self._upload or self.begin_upload()
        tree = self.place(tree)
        self._upload = None
        names = ["tokens", "sizes", *([] if tree.is_chain else ["parents", "ancestors"])]
        names += [name for name in OPTIONAL if getattr(tree, name) is not None]
        inputs = {"lengths": upload["lengths"]} | {name: getattr(tree, name) for name in names}
        stream = choose_stream(tree, self.sampling)
        if stream is not None:
            inputs["keys"] = upload[KEY_NAMES[stream]][:, : tree.width]
        return inputs

    def compute(self, buffers: Mapping[str, Tensor]) -> Verdict:
        """A step on the padded tensors of `_list_inputs`. Tensor operations only; all shapes are those of the buffers.

        Accepted nodes are moved at once, to where `keep` counts them as committed.
        """
        tree, lengths = make_tree(buffers), buffers["lengths"]
        self.cache.place(lengths, tree.width)
        verdict = self._run_model(tree, 0, lengths)
        on_path, bonus = accept_at_once(tree, verdict.logits, self.sampling, buffers.get("keys"))
        if not tree.is_chain:
            self.cache.compact(on_path)
        return replace(verdict, packed=pack(tree.tokens, tree.sizes, tree.wrong, on_path, bonus))

    def keep(self, path: Sequence[Sequence[int]]) -> None:
        """Count the nodes of each row's path as committed. The step has moved them."""
        self._upload = None
        self.cache.commit([len(row) for row in path])


@dataclass(frozen=True)
class FixedStep:
    """All steps of one bucket: their buffers, and their graph once there is one."""

    buffers: Mapping[str, Tensor]
    captured: Captured[Verdict]

    def run(self, compute: Callable[[Mapping[str, Tensor]], Verdict], inputs: Mapping[str, Tensor]) -> Verdict:
        """The result for the inputs, without padding. The next step overwrites it."""
        for name, tensor in inputs.items():
            self.buffers[name][tuple(map(slice, tensor.shape))].copy_(tensor)
        rows, nodes = inputs["tokens"].shape
        verdict = self.captured.run(partial(compute, self.buffers))
        assert verdict.packed is not None
        features = None if verdict.features is None else verdict.features[:rows, :nodes]
        return Verdict(verdict.logits[:rows, :nodes], features, verdict.packed[:rows])


def make_buffer(name: str, like: Tensor, rows: int, nodes: int) -> Tensor:
    """A buffer for an input of a step, filled with trees of one node each."""
    shape = (rows, nodes, nodes if name == "ancestors" else like.shape[-1])[: like.ndim]
    return like.new_full(shape, int(name == "sizes"))


def make_tree(buffers: Mapping[str, Tensor]) -> Tree:
    """The padded trees of a step. What a tree computes from its tensors is computed anew in each step."""
    tokens, sizes = buffers["tokens"], buffers["sizes"]
    if "parents" in buffers:
        tree = Tree(tokens, buffers["parents"], sizes, height=tokens.shape[1] - 1)
    else:
        tree = Tree.chain_of(tokens, sizes)
    return tree.with_tensors({name: buffers[name] for name in ("ancestors", *OPTIONAL) if name in buffers})
