"""The picture of a report: methods by speed, with 95 % intervals, or passes by their number of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.benchmark.passes import OURS, find_medians, split_engines
from scripts.benchmark.questions import ALL
from scripts.shared.plot import COLOURS, GREYS, INK, save_figure

LABELS = {
    "hf": "transformers' generate",
    "hf-prompt-lookup": "transformers' prompt lookup",
    "hf-assistant": "transformers' assistant",
    "none": "Draftless without drafting",
    "merged": "Draftless without training",
    "auto": "Draftless with a trained head",
}


def draw_report(report: Mapping[str, Any], path: Path) -> None:
    """Draw the report's first table into a .png or .svg file."""
    if "passes" in report:
        draw_passes(report, path)
    else:
        draw_methods(report, path)


def draw_methods(report: Mapping[str, Any], path: Path) -> None:
    """A bar for each method over all questions: peers are grey, plain decoding is black, all others are blue."""
    rows = [row for row in report["rows"] if row["category"] == ALL]
    rows.sort(key=lambda row: (not row["method"].startswith("hf"), row["method"] != "none"))
    base = "hf" if any(row["method"] == "hf" for row in rows) else "none"
    with save_figure(path, 7.2, 0.42 * len(rows) + 1.0, font_size=12) as figure:
        pane = figure.subplots()
        for place, row in enumerate(rows):
            name, speed = row["method"], row[f"speedup_vs_{base}"]
            low, high = row[f"speedup_vs_{base}_interval"] or (speed, speed)
            colour = GREYS[1] if name.startswith("hf") else INK if name == "none" else COLOURS[0]
            pane.barh(place, speed, 0.72, color=colour, zorder=2)
            if low < high:
                for line, width in (("white", 3), (INK, 1.5)):
                    pane.plot([low, high], [place, place], color=line, linewidth=width, solid_capstyle="butt", zorder=4)
            text = {"textcoords": "offset points", "va": "center", "fontweight": "bold"}
            pane.annotate(f"{speed:.2f}x", (max(high, speed), place), (5, 0), **text)
        pane.set_yticks(range(len(rows)), [LABELS.get(row["method"], row["method"]) for row in rows])
        pane.invert_yaxis()
        pane.margins(x=0.12, y=0.02)
        dress(pane, "x")
        label = f"speed relative to {LABELS[base]}; lines: 95 % intervals over {rows[0]['questions']} questions"
        figure.supxlabel(f"{label}\n{describe(report)}", fontsize=11)


def draw_passes(report: Mapping[str, Any], path: Path) -> None:
    """A panel for each dtype: batch 1 after the shortest context, a line for each engine."""
    ours, peers = split_engines(report)
    context = min(entry["context"] for entry in ours)
    panels = [entry for entry in ours if entry["context"] == context and entry["batch"] == 1]
    with save_figure(path, 7.2, 4.0, font_size=12) as figure:
        panes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for pane, entry in zip(panes, panels, strict=True):
            for line in (entry, *(peers[dtype] for dtype in peers if dtype == entry["dtype"])):
                colour, dashes = (COLOURS[0], "-") if line["engine"] == OURS else (COLOURS[4], (0, (4, 2)))
                style = {"color": colour, "linestyle": dashes, "linewidth": 2, "marker": ".", "label": line["engine"]}
                pane.plot(line["nodes"], find_medians(line), **style)
            pane.set_xscale("log", base=2)
            ticks = [nodes for nodes in entry["nodes"] if nodes.bit_count() == 1]
            pane.set_xticks(ticks, list(map(str, ticks)))
            pane.set_title(entry["dtype"], loc="left", fontsize=12, fontweight="bold")
            dress(pane, "y")
        panes[0].set_ylim(bottom=0)
        panes[0].set_ylabel("milliseconds of a pass")
        panes[0].legend(frameon=False)
        where = f"{report['settings']['model']} after {context} tokens, {name_processor(report['machine'])}"
        figure.supxlabel(f"nodes of a forward pass\n{where}", fontsize=11)


def dress(pane: Any, axis: str) -> None:
    """A grid along one axis, no frame."""
    pane.grid(axis=axis, color="#DDDDDD", linewidth=0.8, zorder=0)
    pane.tick_params(length=0)
    pane.spines[["top", "right", "bottom"]].set_visible(False)


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
