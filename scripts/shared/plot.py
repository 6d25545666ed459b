"""The style that the project's plots share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which colour-blind eyes can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
GREYS = ("#BDBDBD", "#8C8C8C", "#5C5C5C")
INK = "#222222"


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
