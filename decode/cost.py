"""What a forward pass over N nodes costs beside one over a single node, measured on the model and device at hand.

A tree pays only while verifying it is cheap: 60 nodes cost what one does on a large GPU, and three times as much on a
CPU. So proposers ask instead of assuming.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from decode.tree import Tree

if TYPE_CHECKING:
    from decode.target import Target

SIZES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 256  # committed tokens while measuring
PATIENCE = 1.5  # seconds that measuring may take beyond one pass of each size


class Cost:
    """Times relative to a single node's: `cost(1) == 1`, never falling, linear between the sizes measured."""

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        self.sizes = tuple(sizes)
        self.ratios = tuple(accumulate((time / seconds[0] for time in seconds), max))

    def __call__(self, nodes: int) -> float:
        right = min(max(bisect_left(self.sizes, nodes), 1), len(self.sizes) - 1)
        (x0, x1), (y0, y1) = self.sizes[right - 1 : right + 1], self.ratios[right - 1 : right + 1]
        return max(y0 + (y1 - y0) * (nodes - x0) / (x1 - x0), 1.0)


def measure_cost(target: Target, batch: int) -> Cost:
    """Time passes of all `SIZES`, in turn and take the shortest: other work on the machine only adds."""
    session = target.open(batch)
    session.cache.lengths = [min(CONTEXT, target.context - 1)] * batch
    trees = [Tree.chain([[0] * size] * batch, target.device) for size in SIZES]
    times: list[list[float]] = [[] for _ in SIZES]
    begun = perf_counter()
    while True:
        for tree, taken in zip(trees, times, strict=True):
            _synchronize(target.device)
            started = perf_counter()
            session.verify(tree)
            _synchronize(target.device)
            taken.append(perf_counter() - started)
        rounds, spent = len(times[0]), perf_counter() - begun
        if rounds >= 6 or spent * (rounds + 1) / rounds > PATIENCE:
            # The first round warms caches and kernels up; it counts only where there is no other.
            return Cost(SIZES, [min(taken[1:] or taken) for taken in times])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
