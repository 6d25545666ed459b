"""How fast memory can be read, and the time that a forward pass takes at least by that."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch

from decode.models.cost_curve import open_filled, random_chain
from scripts.gpu_report.models import Subject

COPIED = {"cuda": 1 << 30, "cpu": 1 << 28}  # bytes; more than any cache holds
COPIES = 20


def measure_bandwidth(device: torch.device) -> float:
    """Bytes a second: those that the fastest of some copies of a large tensor reads and writes."""
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    there = torch.empty_like(source)
    wait = torch.get_device_module(device).synchronize
    times = []
    for _ in range(COPIES):
        wait(device)
        begun = perf_counter()
        there.copy_(source)
        wait(device)
        times.append(perf_counter() - begun)
    return 2 * source.nbytes / min(times)


@torch.inference_mode()
def count_cache_bytes(subject: Subject) -> int:
    """The bytes of keys and values of one committed token."""
    session = open_filled(subject.target, 1, 1)
    session.verify(random_chain(1, 1, subject.target))
    pairs = (session.cache.allocated(number) for number in range(len(session.cache.layers)))
    return sum(states[:, :, :1].nbytes for pair in pairs if pair is not None for states in pair)


def compare_with_floor(
    entry: Mapping[str, Any], subject: Subject, cache_bytes: int, bandwidth: float
) -> dict[str, Any]:
    """A pass over one node of each row next to the time of reading its bytes once. entry: of `sum_up_passes`."""
    read = subject.weight_bytes + entry["batch"] * entry["context"] * cache_bytes
    floor, single = 1000 * read / bandwidth, entry["median_ms"][entry["nodes"].index(1)]
    return {
        **{name: entry[name] for name in ("context", "batch")},
        "read_bytes": read,
        "floor_ms": floor,
        "pass_ms": single,
        "share_of_bandwidth": floor / single,
        "tokens_per_second": 1000 * entry["batch"] / single,
        "largest_over_single": entry["median_ms"][-1] / single,
    }
