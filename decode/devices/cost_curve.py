"""The cost of a forward pass over N nodes, relative to one node, as a function."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from math import ceil

from decode.devices.graph import round_up


class CostCurve:
    """Costs relative to a single node: `cost(1) == 1`. Never falling, and linear between sizes and beyond the last.

    A size that was measured as slower than a larger one gets the larger one's cost: it could be padded, or other
    processes disturbed the measurement.
    sizes: numbers of nodes, ascending. seconds: of a pass over each of them. ratios: the same relative to the first.
    """

    def __init__(self, sizes: Sequence[float], seconds: Sequence[float]) -> None:
        self.sizes = tuple(sizes)
        lowest = [*accumulate(reversed(seconds), min)][::-1]
        self.seconds = tuple(lowest)
        self.ratios = tuple(time / lowest[0] for time in lowest)

    def __call__(self, nodes: float) -> float:
        right = min(max(bisect_left(self.sizes, nodes), 1), len(self.sizes) - 1)
        (x0, x1), (y0, y1) = self.sizes[right - 1 : right + 1], self.ratios[right - 1 : right + 1]
        return y0 + (y1 - y0) * (nodes - x0) / (x1 - x0)

    @cached_property
    def padded(self) -> CostCurve:
        """The curve of passes whose nodes are padded to a power of two."""
        return _PaddedCurve(self.sizes, self.seconds)

    def blend(self, other: CostCurve, share: float) -> CostCurve:
        """The curve between this one (share 0) and another (share 1), linear in seconds."""
        sizes = max(self.sizes, other.sizes, key=len)
        pairs = [(self.seconds[0] * self(size), other.seconds[0] * other(size)) for size in sizes]
        return CostCurve(sizes, [first + share * (second - first) for first, second in pairs])


class _PaddedCurve(CostCurve):
    def __call__(self, nodes: float) -> float:
        return super().__call__(round_up(ceil(nodes)))
