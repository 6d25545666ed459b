"""Markdown tables of a benchmark's rows and of starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from scripts.benchmark.questions import MT_BENCH, SECOND_TURNS

SAMPLE = ("loaded", "ready", "peak", "private")  # of a start, see `starts`


def format_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tables of the methods over all questions, of the parts of their time, and of speed-up and tau by category.

    If answers looped, also of tau without the loops, and if methods draft from several sources, of these.
    """
    overall = [row for row in rows if row["category"] == "all"]
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
        tables.append(_list_categories(rows, "vs none", lambda row: _times(row["speedup_vs_none"])))
        tables.append(_list_categories(rows, "tau", lambda row: f"{row['tau']:.2f}"))
        if any(row["loops"] and row["tau_trimmed"] for row in overall):
            tables.append(_list_categories(rows, "tau, loops trimmed", lambda row: f"{row['tau_trimmed']:.2f}"))
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


def format_starts(report: Mapping[str, Any]) -> str:
    """A table of the medians of a report of `starts`."""
    weights = report["machine"]["weights"]
    lines = [["start", "loaded (s)", "ready (s)", "peak (MB)", "peak / weights", "private (MB)", "private / weights"]]
    for entry in report["starts"]:
        loaded, ready, peak, private = (median(sample[name] for sample in entry["samples"]) for name in SAMPLE)
        memory = [text for size in (peak, private) for text in (f"{size / 1e6:.0f}", f"{size / weights:.2f}x")]
        lines.append([entry["kind"], f"{loaded:.1f}", f"{ready:.1f}", *memory])
    return to_markdown(lines)


def _list_categories(
    rows: Sequence[Mapping[str, Any]], title: str, show: Callable[[Mapping[str, Any]], str]
) -> list[list[str]]:
    """A line for each category: MT-bench's, its sum, second turns, others, all. A column for each method but none."""
    found = {(row["category"], row["method"]): row for row in rows}
    names = [name for name in dict.fromkeys(row["method"] for row in rows) if name != "none"]
    categories = dict.fromkeys(row["category"] for row in rows)
    lines = [[title, "questions", *names]]
    places = {"mt_bench": 1, SECOND_TURNS: 2, "all": 4}
    for category in sorted(categories, key=lambda name: places.get(name, 0 if name in MT_BENCH else 3)):
        questions = str(found[category, "none"]["questions"])
        lines.append([category, questions, *(show(found[category, name]) for name in names)])
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
