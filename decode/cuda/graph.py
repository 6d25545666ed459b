"""CUDA graphs: the launches of a function, recorded once and then launched together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from decode.models.user_cache import print_notice

Result = TypeVar("Result")
_capturing = Lock()  # a capture begins by waiting for the device, which ends another one
MOST_KEPT = 4096  # slots of a row: a larger KV cache is not kept for the next batch, whose attention would see them all
MOST_GRAPHS = 64  # of a batch's steps, and of a head's drafts; each takes some megabytes


def round_up(count: int) -> int:
    """The next power of two: rows and nodes are padded to it, so that steps have few different shapes."""
    return 1 << (count - 1).bit_length()


class GraphPool:
    """What graphs share that are never replayed at the same time: memory, and the stream that they are captured on.

    fault: why one could not be captured, other than for a lack of memory. No more are tried then.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory, self.stream = torch.cuda.graph_pool_handle(), _capture_stream(device)
        self.fault: str | None = None

    def renew(self) -> None:
        """Go on after a capture that has failed, with other memory: that of a failed first capture is unusable.

        Before torch 2.13, its allocator goes on as if the capture were under way (pytorch#180395).
        """
        if hasattr(torch._C, "_cuda_endAllocateToPool"):
            with suppress(RuntimeError):  # it was ended
                torch._C._cuda_endAllocateToPool(self.stream.device_index, self.memory)
        self.memory = torch.cuda.graph_pool_handle()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One a device: cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream(device)


def forget_oldest(graphs: dict[Any, Any]) -> None:
    """Make room for one more graph."""
    if len(graphs) >= MOST_GRAPHS:
        del graphs[next(iter(graphs))]


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
        if self._captured is None and self._is_warm and self._pool is not None and self._pool.fault is None:
            self._captured = _capture(partial(function, self.buffers), self._pool)
            self._pool = None  # one attempt is enough
        self._is_warm = True
        if self._captured is None:
            return function(self.buffers)
        graph, result = self._captured
        graph.replay()
        return result


def tell_fault(error: Exception) -> str:
    """Tell the user why there is no graph, and return the reason."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    which = "graph of this shape" if isinstance(error, torch.OutOfMemoryError) else "graphs"
    print_notice(f"no CUDA {which} ({reason}): decoding goes on without")
    return reason


def _capture(function: Callable[[], Result], pool: GraphPool) -> tuple[torch.cuda.CUDAGraph, Result] | None:
    """The function's graph, and the result that a replay will fill. None if it cannot be captured.

    A lack of memory concerns this function alone. Other errors come from the model's code.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads may go on using the GPU meanwhile.
        with (
            _capturing,
            torch.cuda.stream(pool.stream),  # a capture that fails to begin leaves its stream as the current one
            torch.cuda.graph(graph, pool.memory, pool.stream, capture_error_mode="thread_local"),
        ):
            result = function()
    except Exception as error:  # nothing was computed
        pool.renew()
        fault = tell_fault(error)
        pool.fault = None if isinstance(error, torch.OutOfMemoryError) else fault
        return None
    return graph, result
