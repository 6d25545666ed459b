"""Tables and a picture of the time of a forward pass by its number of nodes.

An entry of a report has an `engine`, `dtype`, `context` (tokens before the pass), `batch`, `nodes`, and for each number
of nodes `median_ms` and `samples_ms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from scripts.benchmark.plot import name_processor
from scripts.benchmark.tables import to_markdown
from scripts.shared.plot import COLOURS, GREYS, save_figure

OURS, LLAMA = "Draftless", "llama.cpp"
STYLES = {OURS: (COLOURS[0], "-"), LLAMA: (COLOURS[4], (0, (4, 2)))}
NOTE = "llama.cpp computes the logits of a pass's last token, Draftless those of all nodes."


def sum_up_passes(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries with their medians."""
    fields = ("engine", "dtype", "context", "batch", "nodes")
    return [
        {
            **{name: entry[name] for name in fields},
            "median_ms": [median(samples) for _, samples in zip(entry["nodes"], entry["samples_ms"], strict=True)],
            "samples_ms": entry["samples_ms"],
        }
        for entry in entries
    ]


def format_passes(report: Mapping[str, Any]) -> str:
    """A table for each context, with a row for each number of nodes; llama.cpp is in the first one."""
    ours, peers = _split_engines(report)
    contexts = sorted({entry["context"] for entry in ours})
    parts = []
    for context in contexts:
        columns = [["nodes", *map(str, ours[0]["nodes"])]]
        for entry in (entry for entry in ours if entry["context"] == context):
            columns.append([f"{entry['dtype']}, batch {entry['batch']}", *_show_times(entry)])
            peer = peers.get(entry["dtype"])
            if peer and entry["batch"] == 1 and context == contexts[0]:
                ratios = [own / other for own, other in zip(entry["median_ms"], peer["median_ms"], strict=True)]
                columns.append([LLAMA if peer["context"] else f"{LLAMA}, no context", *_show_times(peer)])
                columns.append([f"{OURS} / {LLAMA}", *(f"{ratio:.2f}" for ratio in ratios)])
        title = f"Milliseconds of a pass after {context} tokens (and relative to one node):"
        parts += [title, to_markdown([*zip(*columns, strict=True)])]
    return "\n\n".join([*parts, *[NOTE] * bool(peers)])


def draw_passes(report: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each dtype: batch 1 after the shortest context."""
    ours, peers = _split_engines(report)
    context = min(entry["context"] for entry in ours)
    panels = [entry for entry in ours if entry["context"] == context and entry["batch"] == 1]
    highest = max(max(entry["median_ms"]) for entry in (*panels, *peers.values()))
    top = max(1.08 * highest, *(4 * entry["median_ms"][0] for entry in panels))
    with save_figure(path, 7.2, 4.0, font_size=12) as figure:
        panes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for pane, entry in zip(panes, panels, strict=True):
            lines = [entry, *(peers[dtype] for dtype in peers if dtype == entry["dtype"])]
            draw_lines(pane, sorted(lines, key=lambda line: line["median_ms"][-1]))
            single = entry["median_ms"][0]
            pane.plot(entry["nodes"], [count * single for count in entry["nodes"]], ":", color=GREYS[1], linewidth=2)
            place = {"xytext": (5, 0), "textcoords": "offset points", "va": "top"}
            pane.annotate("one node\nat a time", (top / single, top), color=GREYS[2], **place)
            pane.set_title(entry["dtype"], loc="left", fontsize=12, fontweight="bold")
        panes[0].set_ylim(0, top)
        panes[0].set_ylabel("milliseconds of a pass")
        where = f"{report['settings']['model']} after {context} tokens, {name_processor(report['machine'])}"
        figure.supxlabel(f"nodes of a forward pass\n{where}", fontsize=11)


def draw_lines(pane: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    """A line for each engine, the lowest first, labelled at its end."""
    for entry, side in zip(entries, ("top", "bottom") if len(entries) > 1 else ("center",), strict=True):
        colour, dashes = STYLES[entry["engine"]]
        pane.plot(entry["nodes"], entry["median_ms"], color=colour, linestyle=dashes, linewidth=2, marker=".", zorder=3)
        place = {"xytext": (7, 0), "textcoords": "offset points", "va": side, "annotation_clip": False}
        end = entry["nodes"][-1], entry["median_ms"][-1]
        pane.annotate(entry["engine"], end, color=colour, fontweight="bold", **place)
    pane.set_xscale("log", base=2)
    ticks = [count for count in entries[0]["nodes"] if count.bit_count() == 1]
    pane.set_xticks(ticks, list(map(str, ticks)))
    pane.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    pane.tick_params(length=0)
    pane.spines[["top", "right"]].set_visible(False)


def _split_engines(report: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], dict[str, Mapping[str, Any]]]:
    """Draftless' entries, and llama.cpp's by dtype."""
    ours = [entry for entry in report["passes"] if entry["engine"] == OURS]
    return ours, {entry["dtype"]: entry for entry in report["passes"] if entry["engine"] == LLAMA}


def _show_times(entry: Mapping[str, Any]) -> list[str]:
    return [f"{time:.1f} ({time / entry['median_ms'][0]:.2f}x)" for time in entry["median_ms"]]
