"""What a head is worth, as measured on held-out text: how often each rank is right, and how far to trust its word.

Shapes: K heads, R ranks, B rows, W paths.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.atomic_write import write_aside
from proposers.fixed_trees import Ranks

FILE = "calibration.json"  # in the head's folder
LARGEST = 256  # nodes of the largest best tree
CERTAIN = -1e-6  # log-probabilities are taken for at most this: the log-odds of 1 are infinite


@dataclass(frozen=True)
class Calibration:
    """A head's record; of an EAGLE head, which has no heads, level by level.

    acceptance [K][R]: the chance that head i's guess of rank r is right where the true tokens before it were each
    among the R likeliest of their heads, so that a tree can hold them: conditional on the path, not marginal.
    confidence [K][3]: (a, b, c) such that a guess of head i with log-probability l, on a path whose chance is believed
    to be e^s, is right with the log-odds a + b logit(l) + c s (Platt, 1999; c because a Medusa head does not know the
    path: its guesses behind an unlikely one are worse than it says).
    positions [K]: the places where the head was tried.
    """

    acceptance: tuple[tuple[float, ...], ...]
    confidence: tuple[tuple[float, float, float], ...]
    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        depth = len(self.acceptance)
        if not depth or not len(self.confidence) == len(self.positions) == depth:
            raise ValueError(
                f"a calibration has as many rows of acceptance ({depth}) as of confidence ({len(self.confidence)}) and "
                f"positions ({len(self.positions)}), at least one"
            )
        if len({len(row) for row in self.acceptance}) > 1 or not self.acceptance[0]:
            raise ValueError("the rows of acceptance must have the same number of ranks, at least one")
        if not all(0 <= chance <= 1 for row in self.acceptance for chance in row):
            raise ValueError("acceptance must lie between 0 and 1")
        if not all(len(row) == 3 and all(map(math.isfinite, row)) for row in self.confidence):
            raise ValueError("each row of confidence must be three finite numbers")

    def trust(self, level: int, sure: Tensor, before: Tensor) -> Tensor:
        """The log of the chance that guesses of head `level` are right, [B, W, R], where what is before them is.

        sure: their log-probabilities; before [B, W, 1]: the scores of the paths before them. A level behind those that
        were measured is taken for the last of them.
        """
        shift, slope, doubt = self.confidence[min(level, len(self.confidence) - 1)]
        return torch.nn.functional.logsigmoid(shift + slope * log_odds(sure) + doubt * before)

    def best_tree(self, nodes: int) -> tuple[Ranks, ...]:
        """The paths of the tree of `nodes` nodes, root included, that has most tokens accepted on average.

        The first n - 1 of them are the best tree of n nodes. Exact where a path's chance is the product of its ranks':
        no path is likelier than its beginning, so the likeliest nodes are a tree.
        """
        return tuple(path for path, _ in islice(self._likeliest(), nodes - 1))

    def expect_tau(self, nodes: int) -> list[float]:
        """The tokens a step, bonus token included, to be expected of the best trees of 1, 2, ... `nodes` nodes."""
        taus = [1.0]
        for _, chance in islice(self._likeliest(), nodes - 1):
            taus.append(taus[-1] + chance)
        return taus

    def _likeliest(self) -> Iterator[tuple[Ranks, float]]:
        """All paths, the likeliest first, with their chances; of equal ones first the shorter, then the lower rank."""
        orders = [sorted(range(len(row)), key=row.__getitem__, reverse=True) for row in self.acceptance]

        def put(above: Ranks, chance: float, place: int) -> None:
            if len(above) < len(orders) and place < len(orders[len(above)]):
                path = (*above, orders[len(above)][place])
                own = chance * self.acceptance[len(above)][path[-1]]
                heapq.heappush(heap, (-own, len(path), path, above, chance, place))

        heap: list[tuple[float, int, Ranks, Ranks, float, int]] = []
        put((), 1.0, 0)
        while heap:
            negative, _, path, above, chance, place = heapq.heappop(heap)
            yield path, -negative
            put(above, chance, place + 1)
            put(path, -negative, 0)

    def save(self, folder: Path | str) -> None:
        """Write it into the head's folder, whole or not at all. The best trees are written down for other readers."""
        tree, taus = self.best_tree(LARGEST), self.expect_tau(LARGEST)
        content = asdict(self) | {"best_tree": tree, "expected_tau": [round(tau, 4) for tau in taus]}
        write_aside(Path(folder) / FILE, lambda file: file.write(json.dumps(content).encode()))


def load_calibration(folder: Path | str) -> Calibration | None:
    """The calibration in a head's folder, None where there is none. Raises ValueError for one that cannot be right."""
    path = Path(folder) / FILE
    if not path.exists():
        return None
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        return Calibration(
            acceptance=tuple(tuple(map(float, row)) for row in content["acceptance"]),
            confidence=tuple((float(a), float(b), float(c)) for a, b, c in content["confidence"]),
            positions=tuple(map(int, content["positions"])),
        )
    except (ValueError, TypeError, KeyError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is no calibration ({reason}); make it anew with scripts/calibrate.py") from error


def log_odds(sure: Tensor) -> Tensor:
    """Of log-probabilities."""
    sure = sure.clamp(max=CERTAIN)
    return sure - torch.log(-torch.expm1(sure))


def trust_blindly(level: int, sure: Tensor, before: Tensor) -> Tensor:
    """A head's own log-probabilities, where nothing was measured."""
    return sure
