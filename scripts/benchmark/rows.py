"""From the records of single questions to the rows of a table: one for each method and category.

A record is what was measured of one group of questions (one question, unless they are batched):
`category`, `questions` (ids) and `turns`; a turn has `questions` (ids), `prompt_tokens` and `methods`, by name:
`tokens`, `steps`, `nodes`, `loops` and `same` with a value for each question, `seconds` with one for each repeat, and
`parts`, the seconds of each part of the loop in all repeats. `nodes`, `parts` and `same` are null where unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from scripts.benchmark.questions import MT_BENCH, task_of


def make_rows(
    records: Sequence[Mapping[str, Any]], differences: Sequence[Mapping[str, Any]], methods: Sequence[str]
) -> list[dict[str, Any]]:
    """A row for each category and method: every category of the records, MT-bench's as one, and all together."""
    present = list(dict.fromkeys(record["category"] for record in records))
    labels = {category: [category] for category in present}
    if any(category in MT_BENCH for category in present):
        labels["mt_bench"] = [category for category in present if category in MT_BENCH]
    labels["all"] = present
    rows = []
    for label, categories in labels.items():
        chosen = [record for record in records if record["category"] in categories]
        ids = {number for record in chosen for number in record["questions"]}
        found = {method: _sum_up(chosen, method) for method in methods}
        for method, row in found.items():
            gaps = [entry["gap"] for entry in differences if entry["method"] == method and entry["question_id"] in ids]
            ratios = {
                f"{kind}speedup_vs_{base}": _divide(row[speed], found[base][speed]) if base in found else None
                for kind, speed in (("", "tokens_per_second"), ("mean_", "mean_of_speeds"))
                for base in ("none", "hf")
            }
            head = {"method": method, "category": label, "questions": len(ids)}
            rows.append({**head, **row, **ratios, "largest_gap": max(gaps, default=None)})
    return rows


def _sum_up(records: Sequence[Mapping[str, Any]], method: str) -> dict[str, Any]:
    """All of a row that needs no other one. Times are medians over the repeats, turn by turn."""
    groups = [[turn["methods"][method] for turn in record["turns"]] for record in records]
    turns = [turn for group in groups for turn in group]
    tokens, steps, seconds = _count(turns), _count(turns, "steps"), sum(median(turn["seconds"]) for turn in turns)
    straight = [
        (count, step)
        for turn in turns
        for count, step, loop in zip(turn["tokens"], turn["steps"], turn["loops"], strict=True)
        if not loop
    ]
    loops = [loop for turn in turns for loop in turn["loops"]]
    same = [equal for turn in turns for equal in turn["same"] or []]
    nodes = [sum(turn["nodes"]) for turn in turns if turn["nodes"] is not None]
    return {
        "answers": len(loops),
        "tokens": tokens,
        "steps": steps,
        "seconds": seconds,
        "tau": _divide(tokens, steps),
        "tau_without_loops": _divide(sum(count for count, _ in straight), sum(step for _, step in straight)),
        "loops": fmean(loops),
        "nodes_per_step": _divide(sum(nodes), steps) if nodes else None,
        "tokens_per_second": _divide(tokens, seconds),
        "mean_of_speeds": fmean(_count(group) / sum(median(turn["seconds"]) for turn in group) for group in groups),
        "parts": _share_out([turn["parts"] for turn in turns if turn["parts"] is not None]),
        "identical": fmean(same) if same else None,
    }


def _count(turns: Iterable[Mapping[str, Any]], what: str = "tokens") -> int:
    return sum(sum(turn[what]) for turn in turns)


def _divide(upper: float, lower: float) -> float | None:
    return upper / lower if lower else None


def _share_out(parts: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """The share of the time that each part of the loop took; all but the target's is overhead."""
    total = sum(sum(part.values()) for part in parts)
    return {name: sum(part[name] for part in parts) / total for name in parts[0]} if total else None


def format_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown tables: the methods over all questions; where their time went; speed-ups over the plain loop and tau by
    category."""
    everything = [row for row in rows if row["category"] == "all"]
    overall = [["method", "tau", "tokens/s", "vs none", "vs hf", "identical", "loops"]]
    overall += [
        [
            row["method"],
            f"{row['tau']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            _times(row["speedup_vs_none"]),
            _times(row["speedup_vs_hf"]),
            _share(row["identical"]) + (f" (gap {row['largest_gap']:.1g})" if row["largest_gap"] is not None else ""),
            _share(row["loops"]),
        ]
        for row in everything
    ]
    timed = [row for row in everything if row.get("parts") is not None]
    spent = [["time in", "nodes", *(timed[0]["parts"] if timed else ())]]
    spent += [[row["method"], f"{row['nodes_per_step']:.1f}", *map(_share, row["parts"].values())] for row in timed]
    names = [row["method"] for row in everything if row["method"] != "none"]
    found = {(row["category"], row["method"]): row for row in rows}
    faster, taus = [["vs none", "questions", *names]], [["tau", "questions", *names]]
    for category in _order(dict.fromkeys(row["category"] for row in rows)):
        cells = [found[category, name] for name in names]
        questions = str(found[category, "none"]["questions"])
        faster.append([category, questions, *(_times(cell["speedup_vs_none"]) for cell in cells)])
        taus.append([category, questions, *(f"{cell['tau']:.2f}" for cell in cells)])
    return "\n\n".join(map(_markdown, [overall, *([spent] if timed else []), *([faster, taus] if names else [])]))


def _order(categories: Iterable[str]) -> list[str]:
    """MT-bench's categories, MT-bench, the others, all."""
    return sorted(
        categories, key=lambda category: (category == "all", task_of(category) != "mt_bench", category == "mt_bench")
    )


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    head, *body = [
        "| "
        + " | ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    ]
    rule = (
        "|" + "|".join("-" * (width + 2 - bool(place)) + ":" * bool(place) for place, width in enumerate(widths)) + "|"
    )
    return "\n".join([head, rule, *body])


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _share(part: float | None) -> str:
    """A percentage that reads 100 % only where it is."""
    if part is None:
        return "-"
    return f"{part:.0%}" if part in (0, 1) else f"{min(part, 0.999):.1%}"
