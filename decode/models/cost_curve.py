"""What a forward pass over N nodes costs beside one over a single node, measured on the model and device at hand.

A tree pays only while verifying it is cheap: 60 nodes cost what one does on a large GPU, and three times as much on a
CPU. So proposers ask instead of assuming.
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
DEAREST = 4.0  # passes over more nodes than cost this are not timed: few trees bring so much
ROUNDS, PATIENCE = 5, 2.5  # passes of each size; seconds that more than one of each may take together


class CostCurve:
    """Times relative to a single node's: `cost(1) == 1`, never falling, linear between the sizes and beyond the last.

    Where more nodes were faster, fewer could be padded to as many, or other work disturbed the measuring.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        self.sizes = tuple(sizes)
        least = [*accumulate(reversed(seconds), min)][::-1]
        self.ratios = tuple(time / least[0] for time in least)

    def __call__(self, nodes: int) -> float:
        right = min(max(bisect_left(self.sizes, nodes), 1), len(self.sizes) - 1)
        (x0, x1), (y0, y1) = self.sizes[right - 1 : right + 1], self.ratios[right - 1 : right + 1]
        return y0 + (y1 - y0) * (nodes - x0) / (x1 - x0)


@torch.inference_mode()  # as the loop has it
def measure_cost_curve(target: StockModel, batch: int) -> CostCurve:
    """Time passes of all `SIZES`, in turn, so that what else the machine does meets all of them; the medians count."""
    session = Session(target, batch)
    session.cache.lengths = [min(CONTEXT, target.context - 1)] * batch
    trees = [_grow(size, batch, target) for size in SIZES]
    _time(session, trees[0])  # the first pass of all is a slow one
    begun, times = perf_counter(), [_time(session, trees[0])]
    for tree in trees[1:]:
        try:
            taken = _time(session, tree)
        except torch.OutOfMemoryError:  # trees of that size cannot be verified anyway
            if len(times) == 1:
                raise
            break
        if taken > DEAREST * times[0]:  # it may be that this was the first of its size
            taken = min(taken, _time(session, tree))
        times.append(taken)
        if taken > DEAREST * times[0]:
            break
    rounds = [times]
    while len(rounds) < ROUNDS and (perf_counter() - begun) * (len(rounds) + 1) / len(rounds) <= PATIENCE:
        rounds.append([_time(session, tree) for tree in trees[: len(times)]])
    return CostCurve(SIZES[: len(times)], [median(taken) for taken in zip(*rounds, strict=True)])


def _grow(size: int, batch: int, target: StockModel) -> Tree:
    """A chain of tokens at random: of a mixture of experts, tokens that are alike would wake the same few."""
    tokens = torch.randint(target.vocabulary, (batch, size), generator=torch.Generator().manual_seed(size))
    return Tree.chain(tokens.tolist(), target.device)


def _time(session: Session, tree: Tree) -> float:
    """The seconds that a pass over the tree takes."""
    _synchronize(session.target.device)
    begun = perf_counter()
    session.verify(tree)
    _synchronize(session.target.device)
    return perf_counter() - begun


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
