"""CUDA graphs: the launches of a function, recorded once and then launched together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from decode.models.user_cache import print_notice

Result = TypeVar("Result")
MOST_KEPT = 4096  # slots of a row: a larger KV cache is not kept for the next batch, whose attention would see them all
MOST_GRAPHS = 64  # of a batch's steps, and of a head's drafts; each takes some megabytes
_failed = False  # in this process: the model's code reads from the device, for example


def round_up(count: int) -> int:
    """The next power of two: rows and nodes are padded to it, so that steps have few different shapes."""
    return 1 << (count - 1).bit_length()


class GraphPool:
    """What graphs share that are never replayed at the same time: memory, and the stream that they are captured on."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.cuda.graph_pool_handle()
        self.stream = _capture_stream(device)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One a device: cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream(device)


def make_pool(device: torch.device) -> GraphPool | None:
    """A pool for a device's graphs; None if it has none."""
    return GraphPool(device) if device.type == "cuda" else None


class Captured(Generic[Result]):
    """Calls of a function with tensors of one shape: buffers for these, and a graph that reads the buffers.

    Without a pool, and if capturing fails, the function runs as it is.
    """

    def __init__(self, pool: GraphPool | None, buffers: Mapping[str, Tensor]) -> None:
        self.buffers, self._pool, self._is_warm = buffers, pool, False
        self._captured: tuple[torch.cuda.CUDAGraph, Result] | None = None

    def run(self, function: Callable[[Mapping[str, Tensor]], Result], inputs: Mapping[str, Tensor]) -> Result:
        """The function's result for the inputs, which may be smaller than their buffers.

        The next call overwrites it, and so may any graph of the same pool. The function must be the same each time, and
        all other tensors that it uses must stay where they are. It runs as it is at first, so that libraries allocate
        what they keep. The second call captures the graph.
        """
        for name, tensor in inputs.items():
            self.buffers[name][tuple(map(slice, tensor.shape))].copy_(tensor)
        if self._captured is None and self._is_warm and self._pool is not None and not _failed:
            self._captured = _capture(partial(function, self.buffers), self._pool)
            self._pool = None  # one attempt is enough
        self._is_warm = True
        if self._captured is None:
            return function(self.buffers)
        graph, result = self._captured
        graph.replay()
        return result


def _capture(function: Callable[[], Result], pool: GraphPool) -> tuple[torch.cuda.CUDAGraph, Result] | None:
    """The function's graph, and the result that a replay will fill. None if it cannot be captured.

    A lack of memory concerns this function alone. Other errors come from the model's code, so no graph is tried again.
    """
    global _failed
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads may go on using the GPU meanwhile.
        with (
            torch.cuda.stream(pool.stream),  # a capture that fails to begin leaves its stream as the current one
            torch.cuda.graph(graph, pool.memory, pool.stream, capture_error_mode="thread_local"),
        ):
            result = function()
    except RuntimeError as error:  # nothing was computed
        is_memory = isinstance(error, torch.OutOfMemoryError)
        _failed = _failed or not is_memory
        what = "no CUDA graph of this shape" if is_memory else "no CUDA graphs"
        print_notice(f"{what} ({str(error).splitlines()[0]}): decoding goes on without")
        return None
    return graph, result
