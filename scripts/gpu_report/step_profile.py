"""What a decoding step does on a GPU: launches, copies, waits, and gaps between kernels, by torch.profiler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from time import perf_counter
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from decode import Proposer, Target, stream

PROMPT = 64  # tokens
FIRST, PROFILED, TIMED = 4, 8, 32  # steps: the first ones allocate
LAUNCHES = "cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch"  # beginnings of names
COPIES = ("cudaMemcpy",)
WAITS = "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"


def profile_step(target: Target, proposer: Proposer | None) -> dict[str, Any]:
    """Figures of a step at batch 1, on average; tokens per second without the profiler. None: there is no GPU."""
    wait = torch.get_device_module(target.device).synchronize
    prompt = [place % min(target.vocabulary, 17) for place in range(PROMPT)]
    settings: dict[str, Any] = {"stop_ids": [], "text": False, "max_new_tokens": target.context - PROMPT}
    chunks = stream(target, [prompt], proposer, **settings)
    for _ in islice(chunks, FIRST):
        pass
    wait(target.device)
    begun, new = perf_counter(), [len(chunk.tokens) for chunk in islice(chunks, TIMED)]
    wait(target.device)
    seconds = perf_counter() - begun
    with profile(activities=list_activities(target.device)) as profiled:
        steps = sum(1 for _ in islice(chunks, PROFILED))
        wait(target.device)
    chunks.close()  # type: ignore[attr-defined]
    figures = {"tokens_per_second": sum(new) / seconds, "tau": sum(new) / len(new)}
    return {**figures, **count_step(profiled.events() or (), steps, target.device.type == "cuda")}


def list_activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]


def count_step(events: Iterable[Any], steps: int, on_gpu: bool) -> dict[str, float | None]:
    """Launches, copies and waits of the host, and the device's busy time and gaps in milliseconds, per step."""
    if not on_gpu:
        return dict.fromkeys(("launches", "copies", "waits", "busy_ms", "gaps_ms"))
    events = list(events)
    names = [event.name for event in events if event.device_type == DeviceType.CPU]
    kernels = [
        (event.time_range.start, event.time_range.end) for event in events if event.device_type == DeviceType.CUDA
    ]
    busy, gaps = split_time(kernels)
    counts = {
        name: sum(event.startswith(begins) for event in names) / steps
        for name, begins in (("launches", LAUNCHES), ("copies", COPIES), ("waits", WAITS))
    }
    return {**counts, "busy_ms": busy / 1000 / steps, "gaps_ms": gaps / 1000 / steps}


def split_time(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """How long at least one of the spans (start, end) runs, and how long none does between the first and the last."""
    if not spans:
        return 0.0, 0.0
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    busy, until = 0.0, first
    for start, end in sorted(spans):
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    return busy, last - first - busy
