"""What a forward pass over N nodes costs, relative to one node: as it was measured, and as it is in the loop."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from math import ceil, log2
from statistics import median

from decode.devices.graph import round_up

MEMORY = 256  # steps that count: a size that is not verified any more is forgotten
RENEWAL = 8  # steps between two corrections
FEWEST = 3  # steps of about the same size that correct the curve
FASTER = 0.8  # steps that take less than this part of what the curve says contradict it, if there are `SURE` of them
SURE = 16


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
        """The curve between this one (share 0) and another (share 1), or beyond it; linear in seconds.

        The other one's passes take no less time: they read more.
        """
        sizes = max(self.sizes, other.sizes, key=len)
        pairs = [(self.seconds[0] * self(size), other.seconds[0] * other(size)) for size in sizes]
        return CostCurve(sizes, [first + share * max(second - first, 0.0) for first, second in pairs])


class _PaddedCurve(CostCurve):
    def __call__(self, nodes: float) -> float:
        return super().__call__(round_up(ceil(nodes)))


class StepTimes:
    """Corrects cost curves by what steps took. Sizes that were not verified get the correction of the nearest ones.

    Medians, because other work on the machine slows single steps down.
    contradicted: steps are so much faster than a curve that the machine must have been busy when that was measured.
    """

    def __init__(self) -> None:
        self._steps = deque[tuple[int, float]](maxlen=MEMORY)  # by `_place`: the seconds, relative to the curve's
        self._count = 0
        self._ratios: dict[int, float] = {}
        self._corrected: dict[CostCurve, CostCurve] = {}
        self.contradicted = False

    def learn(self, curve: CostCurve, rows: int, nodes: float, seconds: float) -> None:
        """Take in how long a step took without its draft. nodes: of a row, on average if passes have no padding."""
        self._steps.append((_place(rows * nodes), seconds / (curve.seconds[0] * curve(nodes))))
        self._count += 1
        if self._count % RENEWAL == 0:
            found: dict[int, list[float]] = {}
            for place, ratio in tuple(self._steps):  # another thread may add some
                found.setdefault(place, []).append(ratio)
            ratios = {place: median(each) for place, each in found.items() if len(each) >= FEWEST}
            self._ratios, self._corrected = ratios, {}
            self.contradicted = any(ratios[place] < FASTER for place in found if len(found[place]) >= SURE)

    def correct(self, curve: CostCurve, rows: int) -> CostCurve:
        """The curve in the loop. The same object until more is learned."""
        ratios, corrected = self._ratios, self._corrected  # another thread may put new ones in their places
        if not ratios:
            return curve
        found = corrected.get(curve)
        if found is None:
            places = (_place(rows * size) for size in curve.sizes)
            nearest = (min(ratios, key=lambda known: abs(known - place)) for place in places)
            seconds = [time * ratios[known] for time, known in zip(curve.seconds, nearest, strict=True)]
            found = corrected[curve] = type(curve)(curve.sizes, seconds)
        return found


def _place(tokens: float) -> int:
    """Numbers of tokens that are counted alike have the same place: two of them double the tokens."""
    return round(2 * log2(tokens))
