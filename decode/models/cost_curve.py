"""The cost of a forward pass over N nodes, relative to one node, measured on the model and device at hand.

On a large GPU, 60 nodes cost as much as one; on a CPU, three times as much. The size of a draft tree depends on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from time import perf_counter

import torch

from decode.models.stock_model import StockModel
from decode.session import Session
from decode.tree import Tree

SIZES = (1, 2, 3, 4, 5, 6, 8, 16, 32, 64)
CONTEXT = 256  # committed tokens while measuring
MAX_COST = 4.0  # larger sizes than the first above this cost are not timed: few trees gain that much
ROUNDS, PATIENCE = 5, 2.5  # passes of each size; seconds that rounds after the first may take together


class CostCurve:
    """Costs relative to a single node: `cost(1) == 1`. Never falling, and linear between sizes and beyond the last.

    A size that was measured as slower than a larger one gets the larger one's cost: it could be padded, or other
    processes disturbed the measurement.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        self.sizes = tuple(sizes)
        lowest = [*accumulate(reversed(seconds), min)][::-1]
        self.ratios = tuple(time / lowest[0] for time in lowest)

    def __call__(self, nodes: int) -> float:
        right = min(max(bisect_left(self.sizes, nodes), 1), len(self.sizes) - 1)
        (x0, x1), (y0, y1) = self.sizes[right - 1 : right + 1], self.ratios[right - 1 : right + 1]
        return y0 + (y1 - y0) * (nodes - x0) / (x1 - x0)


@torch.inference_mode()  # as in the loop
def measure_cost_curve(target: StockModel, batch: int) -> CostCurve:
    """The cost curve of a batch size: medians over rounds of all sizes, so that disturbances meet all of them."""
    session = Session(target, batch)
    session.cache.lengths = [min(CONTEXT, target.context - 1)] * batch
    trees = [_random_chain(size, batch, target) for size in SIZES]
    _time(session, trees[0])  # the first pass is slow
    begun, times = perf_counter(), [_time(session, trees[0])]
    while len(times) < len(trees) and times[-1] <= MAX_COST * times[0]:
        tree = trees[len(times)]
        try:
            times.append(_time(session, tree))
        except torch.OutOfMemoryError:  # trees of that size cannot be verified anyway
            if len(times) == 1:
                raise
            break
        if times[-1] > MAX_COST * times[0]:  # perhaps only because it was the first pass of this size
            times[-1] = min(times[-1], _time(session, tree))
    rounds = [times]
    while len(rounds) < ROUNDS and (perf_counter() - begun) * (len(rounds) + 1) / len(rounds) <= PATIENCE:
        rounds.append([_time(session, tree) for tree in trees[: len(times)]])
    return CostCurve(SIZES[: len(times)], [median(seconds) for seconds in zip(*rounds, strict=True)])


def _random_chain(size: int, batch: int, target: StockModel) -> Tree:
    """A chain of random tokens: equal tokens would all go to the same few experts of a mixture."""
    tokens = torch.randint(target.vocabulary, (batch, size), generator=torch.Generator().manual_seed(size))
    return Tree.chain(tokens.tolist(), target.device)


def _time(session: Session, tree: Tree) -> float:
    """The seconds of a forward pass over a tree."""
    device = session.target.device
    wait = torch.get_device_module(device).synchronize
    wait(device)
    begun = perf_counter()
    session.verify(tree)
    wait(device)
    return perf_counter() - begun
