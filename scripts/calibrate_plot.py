"""A calibration as a picture: how often each rank of each head is right, and what trees are worth by their size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proposers.calibration import Calibration
from scripts.benchmark.plot import COLOURS, INK

NODES = 64


def draw_calibration(calibration: Calibration, title: str, path: Path) -> None:
    """Draw it; the file's suffix says in which format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    inks: dict[Any, Any] = dict.fromkeys(["text.color", "axes.labelcolor", "xtick.color", "ytick.color"], INK)
    with pyplot.rc_context({**inks, "font.size": 9.5, "svg.hashsalt": "draftless"}):
        figure, (left, right) = pyplot.subplots(ncols=2, figsize=(8, 3.4), layout="constrained")
        for number, row in enumerate(calibration.acceptance, start=1):
            colour = COLOURS[(number - 1) % len(COLOURS)]
            left.plot(range(len(row)), row, "o-", color=colour, markersize=4, label=f"{number + 1} tokens ahead")
        left.set(xlabel="rank of the guess", ylabel="right, where those before it are", ylim=(0, None))
        left.legend(frameon=False)
        taus = calibration.expect_tau(NODES)
        right.plot(range(1, len(taus) + 1), taus, color=COLOURS[1])
        right.set(xlabel="nodes of the best tree", ylabel="expected tau", xlim=(1, None), ylim=(1, None))
        for axes in (left, right):
            axes.grid(color="#DDDDDD", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        figure.savefig(path, dpi=200, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)
