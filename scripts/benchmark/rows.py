"""From the records of single questions to rows: one for each method and task, and for all tasks.

A record is the measurement of one group of questions (one question unless they are batched): `category`, `questions`
(ids) and `turns`. A turn has `questions` (ids), `prompt_tokens` and `methods`, by name: `tokens`, `steps`, `trimmed`,
`nodes`, `loops` and `same` with a value for each question, `seconds` with one for each repeat, `parts`, the seconds of
each part of the loop over all repeats, and `accepted`, the accepted draft tokens by source. `trimmed` are tokens and
steps up to where the answer loops. `nodes`, `parts`, `same` and `accepted` are null if unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from scripts.benchmark.questions import ALL, task_of

RESAMPLES = 2000
BASES = ("none", "hf")


def make_rows(
    records: Sequence[Mapping[str, Any]], differences: Sequence[Mapping[str, Any]], methods: Sequence[str]
) -> list[dict[str, Any]]:
    """A row for each method in each task, and in all."""
    rows = []
    tasks = [*dict.fromkeys(task_of(record["category"]) for record in records), ALL]
    for task in tasks:
        chosen = [record for record in records if task in (ALL, task_of(record["category"]))]
        ids = {question for record in chosen for turn in record["turns"] for question in turn["questions"]}
        found = {method: _sum_up(chosen, method) for method in methods}
        samples = _resample(chosen, methods)
        for method, row in found.items():
            row = {"method": method, "category": task, "questions": len(ids), **row}
            for base in BASES:
                speeds = [row["tokens_per_second"], found.get(base, {}).get("tokens_per_second")]
                row[f"speedup_vs_{base}"] = _divide(*speeds)
                row[f"speedup_vs_{base}_interval"] = _find_interval(samples, method, base)
            met = [entry for entry in differences if entry["method"] == method and entry["question_id"] in ids]
            rows.append({**row, "largest_gap": max((entry["gap"] for entry in met), default=None)})
    return rows


def _sum_up(records: Sequence[Mapping[str, Any]], method: str) -> dict[str, Any]:
    """The part of a row that needs no other row. Times are medians over the repeats, turn by turn."""
    turns = [turn["methods"][method] for record in records for turn in record["turns"]]
    measured = [_count_tokens(record, method) for record in records]
    tokens, seconds = (sum(column) for column in zip(*measured, strict=True))
    steps, loops, same = ([value for turn in turns for value in turn[key] or []] for key in ("steps", "loops", "same"))
    trimmed = [pair for turn in turns for pair in turn.get("trimmed") or []]
    accepted = [turn["accepted"] for turn in turns if turn.get("accepted")]
    sources = dict.fromkeys(name for entry in accepted for name in entry)
    nodes = [sum(turn["nodes"]) for turn in turns if turn["nodes"] is not None]
    parts = [turn["parts"] for turn in turns if turn["parts"] is not None]
    total = sum(sum(part.values()) for part in parts)
    return {
        "answers": len(loops),
        "tokens": tokens,
        "steps": sum(steps),
        "seconds": seconds,
        "tau": _divide(tokens, sum(steps)),
        "tau_trimmed": _divide(sum(count for count, _ in trimmed), sum(step for _, step in trimmed)),
        "loops": fmean(loops),
        "nodes_per_step": _divide(sum(nodes), sum(steps)) if nodes else None,
        "tokens_per_second": _divide(tokens, seconds),
        "parts": {name: sum(part[name] for part in parts) / total for name in parts[0]} if total else None,
        "accepted": {name: sum(entry.get(name, 0) for entry in accepted) for name in sources} or None,
        "identical": fmean(same) if same else None,
    }


def _count_tokens(record: Mapping[str, Any], method: str) -> tuple[int, float]:
    """A record's tokens and seconds with a method."""
    turns = [turn["methods"][method] for turn in record["turns"]]
    return sum(sum(turn["tokens"]) for turn in turns), sum(median(turn["seconds"]) for turn in turns)


def _resample(records: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> dict[str, Tensor]:
    """Each method's speed in every bootstrap sample of the records; sample i has the same records for all methods.

    Empty for a single record: one sample has no spread.
    """
    if len(records) < 2:
        return {}
    draws = torch.randint(len(records), (RESAMPLES, len(records)), generator=torch.Generator().manual_seed(0))
    speeds = {}
    for method in methods:
        measured = torch.tensor([_count_tokens(record, method) for record in records], dtype=torch.float64)
        tokens, seconds = measured[draws].sum(1).T
        speeds[method] = tokens / seconds
    return speeds


def _find_interval(samples: Mapping[str, Tensor], method: str, base: str) -> list[float] | None:
    """The 95 % percentile interval of the ratio of two methods' speeds; None without the base or for one record."""
    if base not in samples:
        return None
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return [*(samples[method] / samples[base]).quantile(ends).tolist()]


def _divide(upper: float, lower: float | None) -> float | None:
    return upper / lower if lower else None
