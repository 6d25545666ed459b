"""How results are shown: intervals, Markdown tables, and the style that the project's pictures share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WIDTH = 100  # characters of a table's line
RESAMPLES = 2000
INTERVAL = torch.tensor([0.025, 0.975], dtype=torch.float64)  # the ends of 95 %
# Okabe and Ito's colours, which colour-blind eyes can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
GREYS = ("#BDBDBD", "#8C8C8C", "#5C5C5C")
INK = "#222222"


def resample(pairs: Sequence[tuple[float, float]], generator: torch.Generator | None = None) -> Tensor:
    """The ratio of the two sums in `RESAMPLES` bootstrap samples of the pairs; sample i has the same ones each time.

    generator: draws them instead, for samples that are independent of others.
    """
    generator = generator or torch.Generator().manual_seed(0)
    draws = torch.randint(len(pairs), (RESAMPLES, len(pairs)), generator=generator)
    above, below = torch.tensor(pairs, dtype=torch.float64)[draws].sum(1).T
    return above / below


@contextmanager
def save_figure(path: Path, width: float, height: float, font_size: float) -> Iterator[Any]:
    """A matplotlib figure of that size in inches, saved at the end. The file's suffix is its format."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = dict.fromkeys(["text.color", "axes.labelcolor", "xtick.color", "ytick.color"], INK)
    settings |= {"font.size": font_size, "svg.hashsalt": "draftless"}
    with rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        metadata = {"Date": None} if path.suffix == ".svg" else None  # the same file each time
        figure.savefig(path, dpi=200, facecolor="white", metadata=metadata)


def to_markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table, or several where one is wider than `WIDTH`: each has the first column and some of the others.

    The first line is the head; the first column is left-aligned, the others right-aligned.
    """
    columns = [*zip(*lines, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    parts, used = [[0]], 0
    for column in range(1, len(columns)):
        used += widths[column] + 3
        if widths[0] + 4 + used > WIDTH and len(parts[-1]) > 1:
            parts, used = [*parts, [0]], widths[column] + 3
        parts[-1].append(column)
    return "\n\n".join(_format_table([[line[column] for column in part] for line in lines]) for part in parts)


def _format_table(lines: Sequence[Sequence[str]]) -> str:
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = [[line[0].ljust(first), *map(str.rjust, line[1:], others)] for line in lines]
    rule = f"|{'-' * (first + 2)}|" + "".join(f"{'-' * (width + 1)}:|" for width in others)
    head, *rest = [f"| {' | '.join(line)} |" for line in body]
    return "\n".join([head, rule, *rest])
