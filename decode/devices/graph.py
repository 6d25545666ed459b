"""Graphs: the launches of a function, recorded once and then launched together, on devices that can do so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor

Result = TypeVar("Result")
MOST_KEPT = 4096  # slots of a row: a larger KV cache is not kept for the next batch, whose attention would see them all
MOST_GRAPHS = 64  # of a batch's steps, and of a head's drafts; each takes some megabytes


class GraphPool(ABC):
    """What graphs share that are never replayed at the same time.

    fault: why one could not be captured, other than for a lack of memory. No more are tried then.
    """

    fault: str | None = None

    @abstractmethod
    def capture(self, function: Callable[[], Result]) -> tuple[Callable[[], None], Result] | None:
        """What replays the function's graph, and the result that a replay will fill. None if it cannot be captured."""


class Captured(Generic[Result]):
    """Calls of a function with tensors of one shape: buffers for these, and a graph that reads the buffers.

    Without a pool, and if capturing fails, the function runs as it is. is_warm: the next call is as fast as later ones.
    """

    def __init__(self, pool: GraphPool | None, buffers: Mapping[str, Tensor]) -> None:
        self.buffers, self._pool, self._has_run = buffers, pool, False
        self._captured: tuple[Callable[[], None], Result] | None = None

    @property
    def is_warm(self) -> bool:
        return self._has_run and (self._captured is not None or self._pool is None or self._pool.fault is not None)

    def run(self, function: Callable[[Mapping[str, Tensor]], Result], inputs: Mapping[str, Tensor]) -> Result:
        """The function's result for the inputs, which may be smaller than their buffers.

        The next call overwrites it, and so may any graph of the same pool. The function must be the same each time, and
        all other tensors that it uses must stay where they are. It runs as it is at first, so that libraries allocate
        what they keep. The second call captures the graph.
        """
        for name, tensor in inputs.items():
            self.buffers[name][tuple(map(slice, tensor.shape))].copy_(tensor)
        if self._captured is None and self._has_run and self._pool is not None and self._pool.fault is None:
            self._captured = self._pool.capture(partial(function, self.buffers))
            self._pool = None  # one attempt is enough
        self._has_run = True
        if self._captured is None:
            return function(self.buffers)
        replay, result = self._captured
        replay()
        return result


def round_up(count: int) -> int:
    """The next power of two: rows and nodes are padded to it, so that steps have few different shapes."""
    return 1 << (count - 1).bit_length()


def forget_oldest(graphs: dict[Any, Any]) -> None:
    """Make room for one more graph."""
    if len(graphs) >= MOST_GRAPHS:
        del graphs[next(iter(graphs))]
