"""Questions of Spec-Bench and others: read from a file, taken evenly from its tasks, and grouped into batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from draftless_commands.shared.prompts import read_conversations
from training.conversations import Conversation

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEED_BENCH, MISSING = "speed_bench_", "FULL BENCHMARK DATA SHOULD BE FETCHED"  # the latter stands for texts of others
ALL, CATEGORY = "all", "questions"  # the row that sums all tasks; the category of lines without one


@dataclass(frozen=True)
class Question:
    """One line of the file. Each turn is asked after the earlier turns and their answers."""

    id: int | str
    category: str
    conversation: Conversation  # without an answer: a copy is continued


def load_questions(path: Path) -> list[Question]:
    """The questions of a file of prompts in any form of `read_conversations`.

    A line may also have `question_id` or `task_id` (by default its number) and `category` (by default "questions"), as
    those of Spec-Bench and HumanEval do. SPEED-Bench's categories, which have a `sub_category`, are tasks of their own.
    Raises ValueError with the line's number for a bad line, and for questions of SPEED-Bench before its preparation.
    """
    questions: dict[int | str, Question] = {}
    for asked in read_conversations(str(path)):
        place, fields = asked.place, asked.fields
        number = fields.get("question_id", fields.get("task_id", asked.line))
        category = fields.get("category", CATEGORY)
        if isinstance(number, bool) or not isinstance(number, int | str):
            raise ValueError(f"{place}: question_id is a number or a name")
        if number in questions:
            raise ValueError(f"{place}: question_id {number!r} is there twice")
        if not isinstance(category, str) or category in ("", ALL):
            raise ValueError(f"{place}: category is a name, and not {ALL!r}")
        if asked.messages[-1]["content"].startswith(MISSING):
            raise ValueError(f"{place}: the text is missing; give the test.parquet of SPEED-Bench's prepare_data.py")
        questions[number] = Question(number, SPEED_BENCH * ("sub_category" in fields) + category, asked)
    return list(questions.values())


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
    taken = _alternate(_alternate(categories.values()) for categories in tasks.values())[:limit]
    ids = {question.id for question in taken}
    return [question for question in questions if question.id in ids]


def _alternate(lists: Iterable[Sequence[Question]]) -> list[Question]:
    """The first of each list, then the second of each, and so on."""
    return [question for layer in zip_longest(*lists) for question in layer if question is not None]


def form_groups(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """Groups of up to `size` questions of one task, to be answered as one batch."""
    tasks: dict[str, list[Question]] = {}
    for question in questions:
        tasks.setdefault(task_of(question.category), []).append(question)
    return [group[begin : begin + size] for group in tasks.values() for begin in range(0, len(group), size)]
