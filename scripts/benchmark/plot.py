"""The picture of a report: methods by speed, with 95 % intervals, or passes by their number of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from draftless_commands.benchmark.files import name_numbers
from draftless_commands.benchmark.passes import OURS, find_medians, pair_engines
from draftless_commands.benchmark.questions import ALL
from draftless_commands.shared.results import COLOURS, GREYS, INK, save_figure
from proposers.sources import SOURCES

UNTRAINED = (*SOURCES, "stored")  # sources of merged trees that need no training
LINE = 72  # characters below a picture
LABELS = {
    "hf": "transformers' generate",
    "hf-prompt-lookup": "transformers' prompt lookup",
    "none": "Draftless without drafting",
    "ngram": "Draftless with n-grams",
}


def draw_methods(report: Mapping[str, Any], path: Path) -> None:
    """A bar for each method over all questions: peers are grey, plain decoding is black, all others are blue."""
    rows = [row for row in report["rows"] if row["category"] == ALL and "refused" not in row]
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
        pane.set_yticks(range(len(rows)), [label_method(row) for row in rows])
        pane.invert_yaxis()
        pane.margins(x=0.16, y=0.02)
        _dress(pane, "x")
        questions, groups = (rows[0][name] for name in ("questions", "groups"))
        over = f"{questions} questions" if groups == questions else f"{groups} groups of questions"
        label = f"speed relative to {LABELS[base]}; lines: 95 % intervals over {over}"
        figure.supxlabel(f"{label}\n{fill(describe(report), LINE)}", fontsize=11)


def draw_passes(report: Mapping[str, Any], path: Path) -> None:
    """A panel for each dtype: batch 1 after the shortest context, a line for each engine."""
    pairs = [pair for pair in pair_engines(report) if pair[0]["batch"] == 1]
    context = min(entry["context"] for entry, _ in pairs)
    panels = [pair for pair in pairs if pair[0]["context"] == context]
    with save_figure(path, 7.2, 4.0, font_size=12) as figure:
        panes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for pane, pair in zip(panes, panels, strict=True):
            for line in filter(None, pair):
                colour, dashes = (COLOURS[0], "-") if line["engine"] == OURS else (COLOURS[4], (0, (4, 2)))
                inside = f" ({line['dtype']} arithmetic)" if line.get("weights", line["dtype"]) != line["dtype"] else ""
                style = {"color": colour, "linestyle": dashes, "linewidth": 2, "marker": "."}
                style["label"] = line["engine"] + inside
                pane.plot(line["nodes"], find_medians(line), **style)
            pane.set_xscale("log", base=2)
            pane.set_xticks(*[[nodes for nodes in pair[0]["nodes"] if nodes.bit_count() == 1]] * 2)
            weights = pair[0].get("weights", pair[0]["dtype"])
            pane.set_title(f"weights in {weights}", loc="left", fontsize=12, fontweight="bold")
            _dress(pane, "y")
        panes[0].set(ylim=(0, None), ylabel="milliseconds of a pass")
        panes[0].legend(frameon=False)
        label = f"nodes of a forward pass after {context} tokens"
        figure.supxlabel(f"{label}\n{fill(describe(report), LINE)}", fontsize=11)


def label_method(row: Mapping[str, Any]) -> str:
    """What a method is; for merged trees, by what they grew from: for most models `auto` has no head."""
    name, accepted = row["method"], row.get("accepted")
    if name not in ("merged", "auto") or accepted is None:
        return LABELS.get(name, name)
    trained = [source for source in accepted if source not in UNTRAINED]
    if trained == ["draft"]:
        return f"Draftless with a draft model ({name})"
    return (
        f"Draftless with a trained head ({', '.join(trained)})" if trained else f"Draftless without training ({name})"
    )


def _dress(pane: Any, axis: str) -> None:
    """A grid along one axis, no frame."""
    pane.grid(axis=axis, color="#DDDDDD", linewidth=0.8, zorder=0)
    pane.tick_params(length=0)
    pane.spines[["top", "right", "bottom"]].set_visible(False)


def describe(report: Mapping[str, Any]) -> str:
    """Model and machine in one line."""
    settings, machine = report["settings"], report["machine"]
    processor = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    parts = [settings["model"], *([name_numbers(machine)] if "dtype" in machine else []), processor]
    parts += [f"temperature {settings['temperature']:g}"] if settings.get("temperature") else []
    parts += [f"batches of {settings['batch_size']}"] if settings.get("batch_size", 1) > 1 else []
    return ", ".join(parts)
