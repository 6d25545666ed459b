"""From the records of single questions to rows, one for each method and task, and to their Markdown tables.

A record is the measurement of one group of questions (one question unless they are batched): `category`, `questions`
(ids), `turns` and, by method that gave no answer, `refused`: its version and why. A turn has `questions` (ids),
`prompt_tokens` and `methods`, by name: `tokens`, `steps`, `trimmed`, `nodes`, `loops` and `same` with a value for each
question, `seconds` with one for each repeat, `parts`, the seconds of each part of the loop over all repeats,
`accepted`, the accepted draft tokens by source, `lengths` (of `count_lengths`) and, for another program, `version`.
`trimmed` are tokens and steps up to where the answer loops. `nodes`, `parts`, `same` and `accepted` may be null.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean, median
from typing import Any, TypeAlias

import torch

from draftless_commands.benchmark.measurement import ANSWER, THINKING
from draftless_commands.benchmark.questions import ALL, task_of
from draftless_commands.shared.results import INTERVAL, resample, to_markdown
from draftless_commands.shared.worth import count

Row: TypeAlias = Mapping[str, Any]
BASES = ("none", "hf")
POSITIONS = 6  # of draft tokens that are shown
FOLDERS = re.compile(r"[^,=:/]*/")


def make_rows(records: Sequence[Row], differences: Sequence[Row], methods: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each method in each task, and in all.

    A method that refused a question has one row, without numbers: `refused` is why.
    """
    rows = []
    reasons = {method: why for record in records for method, why in record.get("refused", {}).items()}
    refused = {method: reasons[method] for method in methods if method in reasons}
    methods = [method for method in methods if method not in refused]
    for task in [*dict.fromkeys(task_of(record["category"]) for record in records), ALL]:
        chosen = [record for record in records if task in (ALL, task_of(record["category"]))]
        ids = {question for record in chosen for turn in record["turns"] for question in turn["questions"]}
        samples = {method: resample([_count_tokens(record, method) for record in chosen]) for method in methods}
        found = {method: _sum_up(chosen, method) for method in methods}
        for method, row in found.items():
            row = {"method": method, "category": task, "questions": len(ids), "groups": len(chosen), **row}
            for base in BASES:
                row[f"speedup_vs_{base}"] = row[f"speedup_vs_{base}_interval"] = None
                if base in found:
                    row[f"speedup_vs_{base}"] = row["tokens_per_second"] / found[base]["tokens_per_second"]
                if base in found and len(chosen) > 1:  # one record has no spread
                    ends = (samples[method] / samples[base]).quantile(INTERVAL)
                    row[f"speedup_vs_{base}_interval"] = ends.tolist()
            met = [entry for entry in differences if entry["method"] == method and entry["question_id"] in ids]
            rows.append({**row, "largest_gap": max((entry["gap"] for entry in met), default=None)})
    for method, (version, why) in refused.items():
        rows.append({"method": method, "version": version, "category": ALL, "refused": why})
    return rows


def _sum_up(records: Sequence[Row], method: str) -> dict[str, Any]:
    """The part of a row that needs no other row. Times are medians over the repeats, turn by turn."""
    turns = [turn["methods"][method] for record in records for turn in record["turns"]]
    tokens, seconds = map(sum, zip(*(_count_tokens(record, method) for record in records), strict=True))
    steps, loops, same = ([value for turn in turns for value in turn[key] or []] for key in ("steps", "loops", "same"))
    trimmed = [pair for turn in turns for pair in turn.get("trimmed") or []]
    accepted = Counter[str]()
    for turn in turns:
        accepted.update(turn.get("accepted") or {})
    parts = [turn["parts"] for turn in turns if turn["parts"] is not None]
    nodes = [number for turn in turns for number in turn["nodes"] or ()]
    total = sum(sum(part.values()) for part in parts)
    lengths = add_up([turn["lengths"] for turn in turns if "lengths" in turn])
    return {
        "version": turns[0].get("version"),
        "answers": len(loops),
        "tokens": tokens,
        "steps": sum(steps),
        "seconds": seconds,
        "tau": tokens / sum(steps),
        "tau_by_question": average_tau(records, method),
        "lengths": lengths or None,
        "acceptance": {part: find_rates(counts) for part, counts in lengths.items()} or None,
        "tau_trimmed": sum(length for length, _ in trimmed) / sum(step for _, step in trimmed) if trimmed else None,
        "loops": fmean(loops),
        "nodes_per_step": sum(nodes) / sum(steps) if nodes else None,
        "tokens_per_second": tokens / seconds,
        "parts": {name: sum(part[name] for part in parts) / total for name in parts[0]} if total else None,
        "accepted": dict(accepted) or None,
        "identical": fmean(same) if same else None,
    }


def add_up(found: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """The sums of histograms: of all parts, and by part if answers have thinking."""
    parts = [ALL, *dict.fromkeys(part for lengths in found for part in lengths)]
    chosen = ([each[name] for each in found for name in each if part in (ALL, name)] for part in parts)
    summed = [list(map(sum, zip_longest(*histograms, fillvalue=0))) for histograms in chosen]
    return dict(zip(parts, summed, strict=True)) if THINKING in parts else {ALL: summed[0]} if summed[0] else {}


def find_rates(counts: Sequence[int]) -> list[float]:
    """Entry n: the share of forward passes that accepted a draft token at depth n + 1. counts: by accepted tokens."""
    return [sum(counts[number:]) / sum(counts) for number in range(1, len(counts))]


def average_tau(records: Sequence[Row], method: str) -> float:
    """The mean of the questions' taus, each over all turns of its conversation."""
    tokens, steps = Counter[int | str](), Counter[int | str]()
    for turn in (turn for record in records for turn in record["turns"]):
        for summed, name in ((tokens, "tokens"), (steps, "steps")):
            summed.update(dict(zip(turn["questions"], turn["methods"][method][name], strict=True)))
    return fmean(tokens[question] / steps[question] for question in steps)


def _count_tokens(record: Row, method: str) -> tuple[int, float]:
    """A record's tokens and seconds with a method."""
    turns = [turn["methods"][method] for turn in record["turns"]]
    return sum(sum(turn["tokens"]) for turn in turns), sum(median(turn["seconds"]) for turn in turns)


def estimate_tau(records: Sequence[Row], method: str, by_task: bool = False) -> tuple[float, float, float]:
    """Tau after the prompts' own passes, and the ends of its 95 % interval, bootstrapped over the records.

    by_task: the mean of the tasks' taus, instead of all tokens divided by all passes. Raises ValueError if no answer
    had a second token.
    """
    counted = defaultdict[str, list[tuple[int, int]]](list)
    for record in records:
        turns = [turn["methods"][method] for turn in record["turns"]]
        tokens, steps = (sum(sum(turn[key]) - len(turn[key]) for turn in turns) for key in ("tokens", "steps"))
        if steps:
            counted[task_of(record["category"]) if by_task else ALL].append((tokens, steps))
    if not counted:
        raise ValueError("no answer had more than one token, so there is no tau to measure")
    taus = [sum(tokens for tokens, _ in pairs) / sum(steps for _, steps in pairs) for pairs in counted.values()]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([resample(pairs, generator) for pairs in counted.values()])
    low, high = drawn.mean(0).quantile(INTERVAL).tolist()
    return fmean(taus), low, high


def format_tables(rows: Sequence[Row]) -> str:
    """Tables of the methods over all questions, of the parts of their time, and of speed-up and tau by task.

    For methods that draft, also of acceptance by position and of accepted lengths. If answers looped, also of tau
    without the loops, and if methods draft from several sources, of these. The last lines say what tau rests on, and
    why methods gave no answers.
    """
    labels = shorten([*dict.fromkeys(row["method"] for row in rows)])
    versions = {row["method"]: row["version"] for row in rows if row.get("version")}
    labels |= {name: each for name, each in versions.items() if [*versions.values()].count(each) == 1}
    rows = [{**row, "method": labels[row["method"]]} for row in rows]
    refused = [row for row in rows if "refused" in row]
    rows = [row for row in rows if "refused" not in row]
    overall = [row for row in rows if row["category"] == ALL]
    tables = [list_methods(overall)]
    tables[0] += [[row["method"], *["-"] * (len(tables[0][0]) - 1)] for row in refused]
    tables += list_acceptance([row for row in overall if row["tau"] > 1])
    if timed := [row for row in overall if row.get("parts") is not None]:
        lines = [[row["method"], f"{row['nodes_per_step']:.1f}", *map(_share, row["parts"].values())] for row in timed]
        tables.append([["share of time", "nodes", *timed[0]["parts"]], *lines])
    if mixed := [row for row in overall if len(row["accepted"] or ()) > 1]:
        names = [*dict.fromkeys(name for row in mixed for name in row["accepted"])]
        tables.append([["accepted by source", *names]])
        for row in mixed:
            total = sum(row["accepted"].values()) or 1
            tables[-1].append([row["method"], *(_share(row["accepted"].get(name, 0) / total) for name in names)])
    if len(overall) > 1:
        tables.append(_list_tasks(rows, "vs none", lambda row: _times(row["speedup_vs_none"])))
        tables.append(_list_tasks(rows, "tau", lambda row: f"{row['tau']:.2f}"))
        if any(row["loops"] and row["tau_trimmed"] for row in overall):
            tables.append(_list_tasks(rows, "tau, loops trimmed", lambda row: f"{row['tau_trimmed']:.2f}"))
    basis = f"{count(overall[0]['tokens'], 'token')} of {count(overall[0]['answers'], 'answer')}"
    note = f"tau: on {basis}; trees are sized by their cost unless a method has nodes=N"
    notes = [note, *(f"{row['method']}: {row['refused']}" for row in refused)]
    return "\n\n".join([*map(to_markdown, tables), "\n".join(notes)])


def list_acceptance(drafting: Sequence[Row]) -> list[list[list[str]]]:
    """A table of the share of forward passes that accepted draft tokens, by position, and one of accepted lengths.

    drafting: the rows of methods that draft. Passes are without the prompts'. Older reports have only the mean tau.
    """
    lines = [["tau; accepted at", "by question", "by pass", *map(str, range(1, POSITIONS + 1))]]
    counted = [["accepted tokens", *map(str, range(POSITIONS)), f"{POSITIONS}+"]]
    for row in drafting:
        for part, counts in (row["lengths"] or {ALL: []}).items():
            name = row["method"] + (f", {part}" if part in (ANSWER, THINKING) else "")
            rates = find_rates(counts)
            taus = f"{row['tau_by_question']:.2f}" if part == ALL else "-", f"{1 + sum(rates):.2f}"
            lines.append([name, *taus, *map(_share, [*rates, *[None] * POSITIONS][:POSITIONS])])
            numbers = [*counts, *[0] * POSITIONS][:POSITIONS]
            counted.append([name, *map(str, numbers), str(sum(counts[POSITIONS:]))])
    if len(lines) == 1:
        return []
    return [lines, counted] if any(row["lengths"] for row in drafting) else [[line[:2] for line in lines]]


def list_methods(overall: Sequence[Row]) -> list[list[str]]:
    """The lines of the table of methods, the head first. overall: their rows over all questions."""
    bases = [base for base in BASES if any(row[f"speedup_vs_{base}"] is not None for row in overall)]
    lines = [["method", "tau", "tokens/s", *(f"vs {base} [95 %]" for base in bases), "identical", "loops"]]
    for row in overall:
        speedups = [_times(row[f"speedup_vs_{base}"], row[f"speedup_vs_{base}_interval"]) for base in bases]
        gap = "" if row["largest_gap"] is None else f" (gap {row['largest_gap']:.1g})"
        head = [row["method"], f"{row['tau']:.2f}", f"{row['tokens_per_second']:.1f}"]
        lines.append([*head, *speedups, _share(row["identical"]) + gap, _share(row["loops"])])
    return lines


def shorten(names: Sequence[str]) -> dict[str, str]:
    """By name, the same without folders, if no other name is the same without them."""
    short = {name: FOLDERS.sub("", name) for name in names}
    return {name: label if [*short.values()].count(label) == 1 else name for name, label in short.items()}


def _list_tasks(rows: Sequence[Row], title: str, show: Callable[[Row], str]) -> list[list[str]]:
    """A line for each task, all of them last. A column for each method but none."""
    columns: dict[str, dict[str, str]] = {title: {}, "questions": {}}
    for row in rows:
        task = row["category"]
        columns[title][task], columns["questions"][task] = task, str(row["questions"])
        if row["method"] != "none":
            columns.setdefault(row["method"], {})[task] = show(row)
    return [[*columns], *map(list, zip(*(cells.values() for cells in columns.values()), strict=True))]


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
