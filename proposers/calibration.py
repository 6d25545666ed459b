"""Calibration: how often a head's ranked tokens are right, and how to read its probabilities.

Measured on held-out text by `draftless calibrate`. Shapes: K heads, R ranks, B rows, W paths.
"""

from __future__ import annotations

import heapq
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.atomic_write import write_aside

FILE = "calibration.json"  # in the head's folder
LARGEST = 256  # nodes of the largest tree whose tau is expected
CERTAIN = -1e-6  # upper limit of log-probabilities: the log-odds of 1 are infinite


@dataclass(frozen=True)
class Calibration:
    """How often a head's tokens were right on held-out text. An EAGLE head has a row for each level.

    acceptance [K][R]: the probability that head i's token of rank r is right, given that the true tokens before it
    were each among the R most likely of their heads. So it is conditional on the path, not marginal.
    confidence [K][3]: (a, b, c). A token of head i with log-probability l, on a path with log-probability s, is right
    with the log-odds a + b logit(l) + c s (Platt scaling, 1999). c is for Medusa, whose heads do not see the path:
    after an unlikely path they are worse than their probabilities.
    positions [K]: the number of positions that each head was tried at.

    Raises ValueError for sizes that do not match and for numbers out of range.
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
        if not all(0 <= p <= 1 for row in self.acceptance for p in row):
            raise ValueError("acceptance must lie between 0 and 1")
        if not all(len(row) == 3 and all(map(math.isfinite, row)) for row in self.confidence):
            raise ValueError("each row of confidence must be three finite numbers")

    def log_probabilities(self, level: int, log_q: Tensor, path: Tensor) -> Tensor:
        """Calibrated log-probabilities [B, W, R] that tokens of a level are right, given that their paths are.

        log_q: the head's own log-probabilities; path [B, W, 1]: those of the paths before. Levels deeper than those
        measured are read like the deepest.
        """
        shift, slope, doubt = self.confidence[min(level, len(self.confidence) - 1)]
        return torch.nn.functional.logsigmoid(shift + slope * log_odds(log_q) + doubt * path)

    def expect_tau(self, nodes: int) -> list[float]:
        """The tau to be expected of the best trees of 1, 2, ... `nodes` nodes, root included.

        Exact if a path's probability is the product of its ranks': no path is more likely than its beginning, so the
        most likely nodes form a tree.
        """
        expected: list[float] = []
        heap = [(-1.0, 0)]  # negative probabilities of the nodes to come, and their depths
        while heap and len(expected) < nodes:
            negative, depth = heapq.heappop(heap)
            expected.append((expected[-1] if expected else 0.0) - negative)
            for p in self.acceptance[depth] if depth < len(self.acceptance) else ():
                heapq.heappush(heap, (negative * p, depth + 1))
        return expected

    def save(self, folder: Path | str) -> None:
        """Write it into the head's folder, atomically. The expected tau is written for other programs."""
        content = asdict(self) | {"expected_tau": [round(tau, 4) for tau in self.expect_tau(LARGEST)]}
        write_aside(Path(folder) / FILE, lambda file: file.write(json.dumps(content).encode()))


def load_calibration(folder: Path | str) -> Calibration | None:
    """The calibration in a head's folder, or None. Raises ValueError if the file is damaged."""
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
        raise ValueError(f"{path} is no calibration ({reason}); write a new one with `draftless calibrate`") from error


def log_odds(log_p: Tensor) -> Tensor:
    """The log-odds of log-probabilities."""
    log_p = log_p.clamp(max=CERTAIN)
    return log_p - torch.log(-torch.expm1(log_p))
