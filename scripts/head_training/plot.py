"""The picture of a training: loss and tau over the answer tokens seen."""

from __future__ import annotations

from pathlib import Path

from training.checkpoint import read_metrics


def plot_training(folder: Path, file: Path) -> None:
    """Draw the folder's metrics."""
    from matplotlib.figure import Figure

    rows = read_metrics(folder)
    losses = [(row["tokens"] / 1e6, row["loss"]) for row in rows if "loss" in row]
    taus = [(row["tokens"] / 1e6, row["tau"]) for row in rows if "tau" in row]
    figure = Figure(figsize=(7, 4), layout="constrained")
    left = figure.subplots()
    left.plot(*zip(*losses, strict=True), color="0.7", linewidth=1)
    left.set(xlabel="million answer tokens seen", ylabel="loss (grey)")
    right = left.twinx()
    right.plot(*zip(*taus, strict=True), color="tab:green", marker="o", markersize=3)
    right.set_ylabel("tau on held-out prompts (green)")
    figure.savefig(file, dpi=150)
