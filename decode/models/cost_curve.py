"""The cost of a forward pass over N nodes, relative to one node, measured on the model and device at hand.

On a large GPU, 60 nodes cost as much as one; on a CPU, three times as much. The size of a draft tree depends on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from math import ceil
from statistics import median
from time import perf_counter

import torch
from torch import distributed

from decode.devices.backend import Backend
from decode.devices.graph import round_up
from decode.models.stock_model import StockModel
from decode.session import Session
from decode.trees.tree import Tree

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
CONTEXTS = (256, 4096)  # committed tokens while measuring
STEP = 64  # contexts between these are rounded up to its multiples
MAX_CACHED = 1 << 16  # committed tokens of all rows together while measuring: their keys and values take gigabytes
MAX_COST = 4.0  # larger sizes than the first above this cost are not timed: few trees gain that much
ROUNDS, PATIENCE = 5, 2.0  # passes of each size; seconds after which no further round begins
WARM = 3  # passes of a size up to the first one that counts


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


LEVEL_TIME = 0.05  # of drafting one level, in passes over one node: what an EAGLE-3 head reads next to an 8B model


def fixed_curve(chosen: bool | CostCurve, backend: Backend) -> CostCurve:
    """The fixed curve for one text at a time, where every run or every rank must draft the same trees.

    chosen: a stored curve, or True for the curve of the kind of device. In a `torch.distributed` group the first rank's
    counts, so every rank must call this.
    """
    curves = [chosen if isinstance(chosen, CostCurve) else CostCurve(*backend.fixed_costs)]
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(curves, src=0)
    return curves[0]


def for_batch(curve: CostCurve, rows: int, each_row: float = 0.0) -> CostCurve:
    """The curve of a batch, by the average nodes of a row, if time depends on the tokens of all rows together.

    each_row: the seconds in which a pass reads the keys and values of one more row.
    """
    tokens = sorted({rows, *(size for size in curve.sizes if size > rows), *(rows * size for size in SIZES[1:])})
    seconds = [curve.seconds[0] * curve(count) + (rows - 1) * each_row for count in tokens]
    return CostCurve([count / rows for count in tokens], seconds)


def measured_batches(batch: int) -> list[int]:
    """The powers of four up to the first that is at least `batch`."""
    return [4**exponent for exponent in range(((batch - 1).bit_length() + 1) // 2 + 1)]


def measured_contexts(target: StockModel, batch: int) -> list[int]:
    """The first of `CONTEXTS`; the second too if the model has so many positions and `MAX_CACHED` allows it."""
    longest = min(target.context - 1, MAX_CACHED // batch)
    return [CONTEXTS[0], *(context for context in CONTEXTS[1:] if context <= longest)]


@torch.inference_mode()  # as in the loop
def measure_cost_curve(session: Session, context: int) -> CostCurve:
    """The cost curve of an empty session's batch size after `context` committed tokens, or as many as the model has
    positions for.

    Medians over rounds of all sizes, so that disturbances meet all of them.
    """
    fill(session, min(context, session.target.context - 1))
    trees = [random_chain(size, len(session.lengths), session.target) for size in SIZES]
    times: list[float] = []
    while len(times) < len(trees) and (not times or times[-1] <= MAX_COST * times[0]):
        try:
            # The first passes of a shape are slow. With CUDA graphs, the second one captures it.
            times.append([time_pass(session, trees[len(times)]) for _ in range(WARM)][-1])
        except torch.OutOfMemoryError:  # trees of that size cannot be verified anyway
            if len(times) < 2:
                raise
            break
    rounds, begun = [times], perf_counter()
    while len(rounds) < ROUNDS and perf_counter() - begun < PATIENCE:
        rounds.append([time_pass(session, tree) for tree in trees[: len(times)]])
    return CostCurve(SIZES[: len(times)], [median(seconds) for seconds in zip(*rounds, strict=True)])


def fill(session: Session, context: int) -> Session:
    """The session, as if `context` tokens of each row were committed; their keys and values are zeros."""
    rows = len(session.lengths)
    session.cache.lengths = [context - 1] * rows
    session.verify(random_chain(1, rows, session.target))
    session.keep([[0]] * rows)
    for states in session.cache.states:
        states.zero_()  # memory that was never written to is read faster
    return session


def random_chain(size: int, batch: int, target: StockModel) -> Tree:
    """A chain of random tokens: equal tokens would all go to the same few experts of a mixture."""
    tokens = torch.randint(target.vocabulary, (batch, size), generator=torch.Generator().manual_seed(size))
    return Tree.chain(tokens.tolist(), target.device)


def time_pass(session: Session, tree: Tree) -> float:
    """The seconds of a forward pass over a tree."""
    synchronize = session.target.backend.synchronize
    synchronize()
    begun = perf_counter()
    session.verify(tree)
    synchronize()
    return perf_counter() - begun
