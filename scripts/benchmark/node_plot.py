"""A report as a picture: tau and tokens per second by the number of nodes of each method's trees."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

from scripts.benchmark.method_names import parse_method
from scripts.benchmark.plot import describe, name_method
from scripts.shared.plot import COLOURS, GREYS, INK, save_figure

MARKERS = "osD^vP*X"
Row: TypeAlias = Mapping[str, Any]


def find_families(report: Mapping[str, Any]) -> dict[str, dict[int, Row]]:
    """The rows over all questions of methods that were measured with several numbers of nodes, root included."""
    families: dict[str, dict[int, Row]] = {}
    for row in report["rows"]:
        name = row["method"]
        if row["category"] == "all" and not name.startswith("hf") and (nodes := parse_method(name).nodes):
            families.setdefault(name.rstrip("0123456789").removesuffix("-"), {})[nodes] = row
    return {name: dict(sorted(rows.items())) for name, rows in families.items() if len(rows) > 1}


def draw_nodes(report: Mapping[str, Any], path: Path) -> None:
    """Draw a line for each method with several numbers of nodes, and a level for each baseline."""
    families = find_families(report)
    levels = {row["method"]: row for row in report["rows"] if row["category"] == "all"}
    levels = {name: row for name, row in levels.items() if name == "none" or name.startswith("hf")}  # none is first
    trimmed = all(row["tau_trimmed"] for row in report["rows"] if row["category"] == "all")
    tau, title = ("tau_trimmed", "tau, loops trimmed") if trimmed else ("tau", "tau")
    colours = dict(zip(levels, (INK, *reversed(GREYS)), strict=False))
    with save_figure(path, 7.2, 9.0, font_size=13) as figure:
        panes = figure.subplots(2, sharex=True)
        for pane, key, label in zip(panes, (tau, "tokens_per_second"), (title, "tokens per second"), strict=True):
            for (name, rows), colour, marker in zip(families.items(), cycle(COLOURS), cycle(MARKERS), strict=False):
                values = [row[key] for row in rows.values()]
                style = {"marker": marker, "color": colour, "linewidth": 2, "zorder": 3}
                pane.plot([*rows], values, label=shorten(name), **style)
            for name, row in levels.items():
                if key == "tokens_per_second" or row["tau"] > 1:
                    style = {"color": colours[name], "linewidth": 2, "linestyle": (0, (4, 2))}
                    pane.axhline(row[key], label=shorten(name), **style)
            dress(pane, label, sorted({nodes for rows in families.values() for nodes in rows}))
        handles, labels = panes[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
        figure.supxlabel(f"nodes of a draft tree, root included\n{describe(report)}", fontsize=11)


def shorten(name: str) -> str:
    """A method's name in the legend."""
    return name_method(name).removeprefix("Draftless, ")


def dress(pane: Any, title: str, ticks: list[int]) -> None:
    """A title, powers of two evenly spaced, and no frame."""
    pane.set_title(title, loc="left", fontsize=13, fontweight="bold")
    pane.set_xscale("log", base=2)
    pane.set_xticks(ticks, list(map(str, ticks)))
    pane.minorticks_off()
    pane.grid(axis="y", color="#DDDDDD", linewidth=0.8, zorder=0)
    pane.tick_params(length=0)
    pane.spines[["top", "right"]].set_visible(False)
