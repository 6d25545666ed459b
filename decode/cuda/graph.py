"""CUDA graphs: how they are captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from threading import Lock

import torch

from decode.devices.graph import GraphPool, Result
from decode.devices.user_cache import print_notice

_capturing = Lock()  # a capture begins by waiting for the device, which ends another one


class CudaGraphPool(GraphPool):
    """Memory, and the stream that graphs are captured on."""

    def __init__(self, device: torch.device) -> None:
        self.memory, self.stream = torch.cuda.graph_pool_handle(), _capture_stream(device)

    def capture(self, function: Callable[[], Result]) -> tuple[Callable[[], None], Result] | None:
        """A lack of memory concerns this function alone. Other errors come from the model's code."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on using the GPU meanwhile.
            with (
                _capturing,
                torch.cuda.stream(self.stream),  # a capture that fails to begin leaves its stream as the current one
                torch.cuda.graph(graph, self.memory, self.stream, capture_error_mode="thread_local"),
            ):
                result = function()
        except Exception as error:  # nothing was computed
            self._renew()
            fault = tell_fault(error)
            self.fault = None if isinstance(error, torch.OutOfMemoryError) else fault
            return None
        return graph.replay, result

    def _renew(self) -> None:
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


def tell_fault(error: Exception) -> str:
    """Tell the user why there is no graph, and return the reason."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    which = "graph of this shape" if isinstance(error, torch.OutOfMemoryError) else "graphs"
    print_notice(f"no CUDA {which} ({reason}): decoding goes on without")
    return reason
