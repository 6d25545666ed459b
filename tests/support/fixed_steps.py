"""What steps of fixed shape launch, on the simulated device: prints where two of one bucket differ, as JSON.

    python -m tests.support.fixed_steps

Drafts, checks of trees and steps run as they are instead of as graphs. Compared are op, shapes and memory of each
launch. Of the memory only what exists before counts: weights, KV cache and buffers. Where results are is up to torch's
allocator, which gives a graph memory of its own.
"""

from __future__ import annotations

import gc
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from decode.gpu.graph import Captured
from docs.measure.count_gpu_steps import METHODS, list_steps
from tests.support.recorded_graphs import recorded_graphs
from tests.support.simulated_cuda import LAUNCH, CudaTensor, Event, record, simulate

Launch = tuple[str, tuple[tuple[int, ...], ...], tuple[tuple[int, int] | None, ...]]  # op, shapes, memory


@dataclass
class Bucket:
    """The launches of each step, and what else the host did in one."""

    steps: list[list[Launch]] = field(default_factory=list)
    host: list[str] = field(default_factory=list)


@contextmanager
def watch_steps() -> Iterator[dict[int, Bucket]]:
    """What happens in the steps inside, by bucket, from what would be a graph's begin to its end."""
    buckets: dict[int, Bucket] = defaultdict(Bucket)

    def run(captured: Captured[Any], function: Callable[[Any], Any], inputs: Mapping[str, torch.Tensor]) -> Any:
        for name, tensor in inputs.items():
            captured.buffers[name][tuple(map(slice, tensor.shape))].copy_(tensor)
        tensors = list_tensors()  # kept, so that none of their memory is used again
        known = {tensor.held.untyped_storage().data_ptr() for tensor in tensors}
        with record() as log:
            result = function(captured.buffers)
        bucket = buckets[id(captured)]
        kept.append(captured)  # so that no id is used again
        bucket.steps.append([describe(event, known) for event in log if event.kind == LAUNCH])
        bucket.host += [f"{event.kind} of {event.op} at {event.lines}" for event in log if event.kind != LAUNCH]
        return result

    kept: list[Captured[Any]] = []
    with patch.object(Captured, "run", run):
        yield buckets


def list_tensors() -> list[CudaTensor]:
    """All tensors on the device."""
    return [each for each in gc.get_objects() if type(each) is CudaTensor]


def describe(event: Event, known: set[int]) -> Launch:
    return event.op, event.shapes, tuple(place if place[0] in known else None for place in event.places)


def compare(bucket: Bucket) -> list[str]:
    """Where a step's launches differ from those of the bucket's first one."""
    first = bucket.steps[0]
    return [
        f"{one} / {other}" if len(first) == len(step) else f"{len(first)} launches / {len(step)}"
        for step in bucket.steps[1:]
        for one, other in zip(first, step, strict=False)
        if one != other or len(first) != len(step)
    ]


def count_memory(step: list[Launch]) -> int:
    """How many pieces of memory that exist before a step it uses."""
    return len({place for _, _, places in step for place in places if place is not None})


def watch_method(method: str) -> dict[str, Any]:
    with watch_steps() as buckets:
        list_steps(method, "graphs", count=10)
    return {
        "compared": max(len(bucket.steps) for bucket in buckets.values()) - 1,
        "memory": max(count_memory(bucket.steps[0]) for bucket in buckets.values()),
        "kinds": len(buckets),
        "differences": [line for bucket in buckets.values() for line in compare(bucket)][:9],
        "host": [line for bucket in buckets.values() for line in bucket.host][:9],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with simulate(), recorded_graphs():
        print(json.dumps({method: watch_method(method) for method in METHODS}))
