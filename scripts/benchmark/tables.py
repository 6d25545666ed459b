"""Markdown tables of a benchmark's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripts.benchmark.questions import ALL


def format_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tables of the methods over all questions, of the parts of their time, and of speed-up and tau by task.

    If answers looped, also of tau without the loops, and if methods draft from several sources, of these.
    """
    overall = [row for row in rows if row["category"] == ALL]
    timed = [row for row in overall if row.get("parts") is not None]
    methods = [["method", "tau", "tokens/s", "vs none [95 %]", "vs hf [95 %]", "identical", "loops"]]
    for row in overall:
        speedups = [_times(row[f"speedup_vs_{base}"], row[f"speedup_vs_{base}_interval"]) for base in ("none", "hf")]
        gap = "" if row["largest_gap"] is None else f" (gap {row['largest_gap']:.1g})"
        head = [row["method"], f"{row['tau']:.2f}", f"{row['tokens_per_second']:.1f}"]
        methods.append([*head, *speedups, _share(row["identical"]) + gap, _share(row["loops"])])
    tables = [methods]
    if timed:
        lines = [[row["method"], f"{row['nodes_per_step']:.1f}", *map(_share, row["parts"].values())] for row in timed]
        tables.append([["share of time", "nodes", *timed[0]["parts"]], *lines])
    if mixed := [row for row in overall if len(row["accepted"] or ()) > 1]:
        tables.append(_list_sources(mixed))
    if len(overall) > 1:
        tables.append(_list_tasks(rows, "vs none", lambda row: _times(row["speedup_vs_none"])))
        tables.append(_list_tasks(rows, "tau", lambda row: f"{row['tau']:.2f}"))
        if any(row["loops"] and row["tau_trimmed"] for row in overall):
            tables.append(_list_tasks(rows, "tau, loops trimmed", lambda row: f"{row['tau_trimmed']:.2f}"))
    return "\n\n".join(map(to_markdown, tables))


def _list_sources(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line for each method, a column for each source: its share of the accepted draft tokens."""
    names = [*dict.fromkeys(name for row in rows for name in row["accepted"])]
    lines = [["accepted by source", *names]]
    for row in rows:
        total = sum(row["accepted"].values()) or 1
        shares = [row["accepted"][name] / total if name in row["accepted"] else None for name in names]
        lines.append([row["method"], *map(_share, shares)])
    return lines


def _list_tasks(
    rows: Sequence[Mapping[str, Any]], title: str, show: Callable[[Mapping[str, Any]], str]
) -> list[list[str]]:
    """A line for each task, all of them last. A column for each method but none."""
    found = {(row["category"], row["method"]): row for row in rows}
    tasks, methods = (list(dict.fromkeys(key)) for key in zip(*found, strict=True))
    names = [name for name in methods if name != "none"]
    lines = [[title, "questions", *names]]
    for task in tasks:
        cells = (show(found[task, name]) for name in names)
        lines.append([task, str(found[task, "none"]["questions"]), *cells])
    return lines


def to_markdown(lines: Sequence[Sequence[str]]) -> str:
    """The first line is the head; the first column is left-aligned, the others right-aligned."""
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = [[line[0].ljust(first), *map(str.rjust, line[1:], others)] for line in lines]
    rule = f"|{'-' * (first + 2)}|" + "".join(f"{'-' * (width + 1)}:|" for width in others)
    head, *rest = [f"| {' | '.join(line)} |" for line in body]
    return "\n".join([head, rule, *rest])


def _times(ratio: float | None, interval: Sequence[float] | None = None) -> str:
    if ratio is None:
        return "-"
    low, high = interval or (ratio, ratio)
    return f"{ratio:.2f}x" + (f" [{low:.2f}, {high:.2f}]" if low < high else "")


def _share(part: float | None) -> str:
    """A percentage; rounding never makes it 100 %."""
    if part is None:
        return "-"
    return f"{part:.0%}" if part in (0, 1) else f"{min(part, 0.999):.1%}"
