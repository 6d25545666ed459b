"""Questions in Spec-Bench's format: reading, choosing and grouping them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from training.conversations import check_prompt, read_lines

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
ALL = "all"  # the row that sums all tasks


@dataclass(frozen=True)
class Question:
    """One line of the file. Each turn is asked after the earlier turns and their answers."""

    id: int | str
    category: str
    turns: tuple[str, ...]


def load_questions(path: Path) -> list[Question]:
    """Read a JSONL file with `question_id`, `category` and `turns` in each line; other fields are ignored.

    Raises ValueError with the line's number for a bad line.
    """
    questions: dict[int | str, Question] = {}
    for line, fields in read_lines(path):
        place = f"{path}, line {line}"
        question = _make_question(fields, place)
        if question.id in questions:
            raise ValueError(f"{place}: question_id {question.id!r} is there twice")
        questions[question.id] = question
    return list(questions.values())


def _make_question(fields: dict[str, Any], place: str) -> Question:
    if missing := [name for name in ("question_id", "category", "turns") if name not in fields]:
        raise ValueError(f"{place}: {' and '.join(missing)} missing")
    number, category, turns = fields["question_id"], fields["category"], fields["turns"]
    if isinstance(number, bool) or not isinstance(number, int | str):
        raise ValueError(f"{place}: question_id is a number or a name")
    if not isinstance(category, str) or category in ("", ALL):
        raise ValueError(f"{place}: category is a name, and not {ALL!r}")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{place}: turns is a list of at least one text")
    return Question(number, category, tuple(check_prompt(turn, place) for turn in turns))


def task_of(category: str) -> str:
    """Spec-Bench's task: MT-bench's eight categories are one task, every other category is its own."""
    return "mt_bench" if category in MT_BENCH else category


def take_evenly(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """The first questions of each task in equal numbers, `limit` in all, in their order; None takes all.

    MT-bench's are taken in equal numbers from its categories. Spec-Bench has equally many questions per task, so a part
    of it keeps its balance.
    """
    tasks: dict[str, dict[str, list[Question]]] = {}
    for question in questions:
        tasks.setdefault(task_of(question.category), {}).setdefault(question.category, []).append(question)
    taken = set(_alternate(_alternate(categories.values()) for categories in tasks.values())[:limit])
    return [question for question in questions if question in taken]


def _alternate(lists: Iterable[Sequence[Question]]) -> list[Question]:
    """The first of each list, then the second of each, and so on."""
    return [question for layer in zip_longest(*lists) for question in layer if question is not None]


def form_groups(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """Groups of up to `size` questions of one category, to be answered as one batch."""
    categories: dict[str, list[Question]] = {}
    for question in questions:
        categories.setdefault(question.category, []).append(question)
    return [group[begin : begin + size] for group in categories.values() for begin in range(0, len(group), size)]


def digest_questions(questions: Sequence[Question]) -> str:
    """A hash of exactly these questions."""
    content = json.dumps([[question.id, question.category, question.turns] for question in questions])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
