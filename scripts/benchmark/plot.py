"""A report as a picture: the speed of each method relative to plain decoding, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from scripts.benchmark.questions import SECOND_TURNS, task_of
from scripts.shared.plot import COLOURS, GREYS, INK, save_figure

TASKS = {"mt_bench": "MT-bench", "qa": "QA", "math_reasoning": "Math", "rag": "RAG"}  # others: capitalized
LABELS = {
    "none": "Draftless, plain decoding",
    "ngram": "Draftless, n-grams",
    "suffix": "Draftless, suffix automaton",
    "recycling": "Draftless, recycled predictions",
    "lookahead": "Draftless, lookahead",
    "merged": "Draftless, merged",
    "auto": "Draftless, merged with a head",
    "eagle": "Draftless, EAGLE head",
    "eagle3": "Draftless, EAGLE-3 head",
    "draft": "Draftless, draft model",
    "medusa": "Draftless, Medusa head",
    "hydra": "Draftless, Hydra head",
    "hf": "Hugging Face generate",
    "hf-prompt-lookup": "Hugging Face prompt lookup",
    "hf-prompt-lookup-5": "Hugging Face prompt lookup, 5",
    "prompt-lookup": "prompt lookup in Draftless",
    "hf-assistant": "Hugging Face assistant",
}
BEST = 2  # proposers that are shown by task; all are shown over all questions


def draw_plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw all methods over all questions, and below them peers and best proposers by task."""
    rows = {(row["category"], row["method"]): row for row in report["rows"]}
    methods = [row["method"] for row in report["rows"] if row["category"] == "all"]
    methods.sort(key=lambda name: not name.startswith("hf"))
    peers = [name for name in methods if name.startswith("hf")]
    proposers = [name for name in methods if name not in ("none", *peers)]
    colours = {
        "none": INK,
        **dict(zip(peers, cycle(GREYS), strict=False)),
        **dict(zip(proposers, cycle(COLOURS), strict=False)),
    }
    best = sorted(proposers, key=lambda name: -rows["all", name]["speedup_vs_none"])[:BEST]
    by_task = [name for name in methods if name in (*peers, *best)]
    count = next(row["questions"] for row in report["rows"] if row["category"] == "all")
    tasks = [
        task for task in dict.fromkeys(task_of(category) for category, _ in rows) if task not in (SECOND_TURNS, "all")
    ]
    heights = [0.34 * len(methods) + 0.2, (0.13 * len(by_task) + 0.13) * len(tasks)]
    panels = 1 + (len(tasks) > 1 and bool(by_task))
    with save_figure(path, 7.2, sum(heights[:panels]) + 1.0, font_size=12) as figure:
        panes = figure.subplots(panels, sharex=True, squeeze=False, height_ratios=heights[:panels])[:, 0]
        draw_bars(panes[0], [rows["all", name] for name in methods], colours, range(len(methods)), 0.72, numbered=True)
        panes[0].set_yticks(range(len(methods)), list(map(name_method, methods)))
        if panels > 1:
            for place, name in enumerate(by_task):
                shift = (place - (len(by_task) - 1) / 2) * 0.8 / len(by_task)
                places = [task + shift for task in range(len(tasks))]
                draw_bars(panes[1], [rows[task, name] for task in tasks], colours, places, 0.8 / len(by_task))
            panes[1].set_yticks(range(len(tasks)), [TASKS.get(task, task.capitalize()) for task in tasks])
        for pane, questions in zip(panes, (f"all {count} questions", "by task"), strict=False):
            dress(pane, questions)
        label = "speed relative to Draftless' plain decoding; black lines: 95 % intervals"
        figure.supxlabel(f"{label}\n{describe(report)}", fontsize=11)


def draw_bars(
    pane: Any,
    rows: Sequence[Mapping[str, Any]],
    colours: Mapping[str, str],
    places: Sequence[float],
    thickness: float,
    numbered: bool = False,
) -> None:
    """A horizontal bar for each row, with its interval and, if `numbered`, its speed as text."""
    for row, place in zip(rows, places, strict=True):
        speed, interval = row["speedup_vs_none"], row["speedup_vs_none_interval"]
        pane.barh(place, speed, thickness, color=colours[row["method"]], edgecolor="white", linewidth=0.6, zorder=2)
        low, high = interval or (speed, speed)
        if low < high:
            for colour, width in (("white", 3), (INK, 1.5)):
                pane.plot([low, high], [place, place], color=colour, linewidth=width, solid_capstyle="butt", zorder=4)
        if numbered:
            text = {"textcoords": "offset points", "va": "center", "fontweight": "bold"}
            pane.annotate(f"{speed:.2f}x", (max(high, speed), place), (5, 0), zorder=5, **text)


def dress(pane: Any, caption: str) -> None:
    """First row on top, a caption at the lower right, a line at plain decoding's speed, no frame."""
    pane.invert_yaxis()
    pane.margins(y=0.02)
    pane.locator_params(axis="x", steps=[5, 10], nbins=6)
    pane.annotate(caption, (1, 0), (-4, 6), "axes fraction", "offset points", ha="right", fontstyle="italic")
    pane.axvline(1, color=INK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=3)
    pane.grid(axis="x", color="#DDDDDD", linewidth=0.8, zorder=0)
    pane.tick_params(length=0)
    pane.spines[["top", "right", "bottom"]].set_visible(False)


def name_method(name: str) -> str:
    """A method as a reader knows it."""
    return LABELS.get(name, f"Draftless, {name}")


def describe(report: Mapping[str, Any]) -> str:
    """Model and machine in one line."""
    settings, machine = report["settings"], report["machine"]
    temperature, batch_size = settings["temperature"], settings["batch_size"]
    parts = [settings["model"], machine["dtype"], name_processor(machine)]
    parts += [f"temperature {temperature:g}"] if temperature else []
    parts += [f"batches of {batch_size}"] if batch_size > 1 else []
    return ", ".join(parts)


def name_processor(machine: Mapping[str, Any]) -> str:
    """The GPU, or the CPU with its number of threads."""
    threads = machine["threads"]
    return str(machine["gpu"] or f"{machine['cpu']}, {threads} thread{'s' * (threads > 1)}")
