"""A bench as a picture: the speed of each method beside Hugging Face's `generate`, by Spec-Bench's tasks."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from scripts.benchmark.questions import task_of

LABELS = {
    "mt_bench": "MT-bench",
    "translation": "Translation",
    "summarization": "Summarization",
    "qa": "QA",
    "math_reasoning": "Math",
    "rag": "RAG",
    "all": "all",
    "none": "Draftless, no guessing",
    "ngram": "Draftless, n-grams",
    "eagle": "Draftless, EAGLE-1",
    "eagle3": "Draftless, EAGLE-3",
    "draft": "Draftless, draft model",
    "medusa": "Draftless, Medusa head",
    "hydra": "Draftless, Hydra head",
    "hf": "Hugging Face generate",
    "hf-prompt-lookup": "Hugging Face, prompt lookup",
    "hf-assistant": "Hugging Face, assistant",
}
# Okabe and Ito's colours, told apart by colour-blind eyes too; what others made is grey.
COLOURS = ("#56B4E9", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#F0E442")
GREYS = ("#C4C4C4", "#8C8C8C", "#5C5C5C")
INK = "#222222"
FORMATS = (".png", ".svg")
ALL_WIDTH = 2.2  # the bars of "all" bear numbers


def check_plot(path: Path) -> None:
    """Raise ValueError where the plot could not be drawn: before the work, not after it."""
    if path.suffix not in FORMATS:
        raise ValueError(f"--plot {path} must end in {' or '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--plot needs matplotlib: pip install "draftless[plot]"')


def draw_plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw the rows of a report; the file's suffix says in which format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {(row["category"], row["method"]): row["tokens_per_second"] for row in report["rows"]}
    methods = list(dict.fromkeys(method for _, method in found))
    base = "hf" if "hf" in methods else "none"
    methods = sorted(set(methods) - {base}, key=lambda name: (not name.startswith("hf"), methods.index(name)))
    groups = list_groups([category for category, _ in found])
    inks: dict[Any, Any] = dict.fromkeys(["text.color", "axes.labelcolor", "xtick.color", "ytick.color"], INK)
    with pyplot.rc_context({**inks, "font.size": 10, "svg.hashsalt": "draftless"}):
        figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
        _draw_bars(axes, [[found[group, name] / found[group, base] for group in groups] for name in methods], methods)
        _dress(axes, groups, base)
        figure.suptitle(write_title(report), fontsize=11, x=0.01, ha="left")
        figure.legend(loc="outside lower center", ncols=min(len(methods) + 1, 3), frameon=False, fontsize=9)
        figure.savefig(path, dpi=200, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def list_groups(categories: Sequence[str]) -> list[str]:
    """Spec-Bench's tasks, in its order, any others, and "all" at the end."""
    known = [name for name in LABELS if name in categories and name != "all"]
    others = [name for name in dict.fromkeys(map(task_of, categories)) if name not in LABELS]
    return [*known, *others, "all"]


def write_title(report: Mapping[str, Any]) -> str:
    """Which model on which machine."""
    settings, machine = report["settings"], report["machine"]
    place = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] != 1)}"
    chance = f", temperature {settings['temperature']:g}" if settings["temperature"] else ""
    batch = f", batches of {settings['batch_size']}" if settings["batch_size"] > 1 else ""
    return f"{settings['model']}, {machine['dtype']}, on {place}{chance}{batch}"


def _draw_bars(axes: Any, heights: Sequence[Sequence[float]], methods: Sequence[str]) -> None:
    """A bar for each method in each group; `heights[method][group]`."""
    colours, greys = cycle(COLOURS), cycle(GREYS)
    room = 0.8 / max(len(methods), 1)
    size = min(8.5, 50 / max(len(methods), 1))  # of numbers, which stand side by side
    for place, (method, row) in enumerate(zip(methods, heights, strict=True)):
        widths = [room] * (len(row) - 1) + [room * ALL_WIDTH]
        lefts = [group - 0.4 + place * width for group, width in enumerate(widths)]
        axes.bar(
            lefts,
            row,
            widths,
            align="edge",
            color=next(greys if method.startswith("hf") else colours),
            edgecolor="white",
            linewidth=0.6,
            label=LABELS.get(method, f"Draftless, {method}"),
            zorder=2,
        )
        middle = lefts[-1] + widths[-1] / 2
        axes.annotate(
            f"{row[-1]:.2f}", (middle, row[-1]), (0, 2), textcoords="offset points", ha="center", fontsize=size
        )


def _dress(axes: Any, groups: Sequence[str], base: str) -> None:
    """Ticks, the line at 1, and no more than that."""
    axes.axhline(1, color=INK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=3, label=f"{LABELS[base]} = 1")
    ticks = [*range(len(groups) - 1), len(groups) - 1.4 + 0.4 * ALL_WIDTH]
    axes.set_xticks(ticks, [LABELS.get(group, group) for group in groups], fontsize=9)
    axes.set_xlim(-0.5, len(groups) - 1.3 + 0.8 * ALL_WIDTH)
    axes.get_xticklabels()[-1].set_fontweight("bold")
    axes.set_ylabel(f"speed ({LABELS[base]} = 1)", fontsize=9, labelpad=6)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8, zorder=0)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
