"""CUDA graphs on the simulated device: they record ops, and a replay runs them again on the same tensors.

A replay computes with what was captured. So a number of the host that a step would need anew each time, but that was
captured with it, gives wrong tokens here as it does on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.support.simulated_cuda import LAUNCH, MAKES_NOTHING, Call, capture, is_view, is_written, note

GRAPH = "graph of"  # a number of launches: the op that a log has for a replay


class RecordedGraph:
    """What `torch.cuda.CUDAGraph` is used for."""

    calls: list[Call]

    def replay(self) -> None:
        launches = [call for call in self.calls if is_launch(call)]
        note(LAUNCH, f"{GRAPH} {len(launches)}")
        for call in launches:
            run_again(call)


def is_launch(call: Call) -> bool:
    return not is_view(call.func) and call.func._schema.name not in MAKES_NOTHING


def run_again(call: Call) -> None:
    """Run an op again. Its result is where it was."""
    result = call.func(*call.args, **call.kwargs)
    if not is_written(call.func):
        for before, now in zip(tree_leaves(call.result), tree_leaves(result), strict=True):
            if isinstance(before, Tensor):
                before.copy_(now)


@contextmanager
def record_graph(graph: RecordedGraph, *settings: Any, **more: Any) -> Iterator[None]:
    """What `torch.cuda.graph` is used for."""
    with capture() as graph.calls:
        yield


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Make graphs usable on the simulated device."""
    fakes = {
        "CUDAGraph": RecordedGraph,
        "graph": record_graph,
        "graph_pool_handle": int,
        "Stream": lambda device: None,
        "stream": nullcontext,
    }
    with patch.multiple("torch.cuda", **fakes):
        yield
