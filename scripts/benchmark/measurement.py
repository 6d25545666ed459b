"""Spec-Bench's questions, and measuring a group of them with every method in turn."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

from tqdm import tqdm

from decode import Target
from scripts.benchmark.methods import Ask, Measured, Method, Prompts
from scripts.shared.prompts import encode_turn, read_prompts
from training.conversations import Conversation, read_conversation
from training.data import count_before_loop, has_looped
from training.rendering import Renderer

WARM_UP = 64  # tokens of an answer that is not measured
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
ALL, CATEGORY = "all", "questions"  # the row that sums all tasks; the category of lines without one


@dataclass(frozen=True)
class Question:
    """One line of the file. Each turn is asked after the earlier turns and their answers."""

    id: int | str
    category: str
    turns: tuple[str, ...]  # the last message that is there, and those after its answer
    row: Mapping[str, Any] | None = field(
        default=None, compare=False, repr=False
    )  # the whole line, if it has more than turns

    def open(self) -> Conversation:
        """Its conversation, without an answer."""
        row = {"turns": [*self.turns]} if self.row is None else self.row
        return read_conversation(row, f"question {self.id}", answered=False)


def load_questions(path: Path) -> list[Question]:
    """The questions of a file of prompts in any form of `read_prompts`.

    A line may also have `question_id` (by default its number) and `category` (by default "questions"), as those of
    Spec-Bench do. Raises ValueError with the line's number for a bad line.
    """
    questions: dict[int | str, Question] = {}
    for asked in read_prompts(str(path)):
        place, fields = asked.place, asked.fields
        number, category = fields.get("question_id", asked.line), fields.get("category", CATEGORY)
        if isinstance(number, bool) or not isinstance(number, int | str):
            raise ValueError(f"{place}: question_id is a number or a name")
        if number in questions:
            raise ValueError(f"{place}: question_id {number!r} is there twice")
        if not isinstance(category, str) or category in ("", ALL):
            raise ValueError(f"{place}: category is a name, and not {ALL!r}")
        has_more = len(asked.messages) > 1 or bool(asked.options)
        turns = (asked.messages[-1]["content"], *asked.later)
        questions[number] = Question(number, category, turns, fields if has_more else None)
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


def open_conversations(questions: Sequence[Question]) -> list[Conversation]:
    """Conversations whose answers will be plain decoding's, so that all methods see the same prompts."""
    return [question.open() for question in questions]


def follow_methods(methods: Mapping[str, Method], bar: Any) -> dict[str, Method]:
    """The methods, whose batches of answers move a bar of tqdm's by one each."""

    def follow(method: Method, is_warm_up: bool) -> Ask:
        ask = method(is_warm_up)

        def answer(prompts: Prompts, seed: int, max_new_tokens: int) -> Measured:
            measured = ask(prompts, seed, max_new_tokens)
            bar.update()
            return measured

        return answer

    return {name: partial(follow, method) for name, method in methods.items()}


def measure_groups(
    methods: Mapping[str, Method], groups: Sequence[Sequence[Question]], done: int, target: Target, options: Namespace
) -> Iterator[dict[str, Any]]:
    """The record of each group from number `done` on, after a warm-up, and meanwhile a bar on a terminal's stderr."""
    if done == len(groups):
        return
    ends = [*accumulate(len(methods) * options.repeats * _count_turns(group) for group in groups)]
    ends = [len(methods) + end for end in ends]  # after the warm-up
    begun = ends[done - 1] - len(methods) if done else 0
    with tqdm(total=ends[-1], initial=begun, unit=" answers", disable=None) as bar:
        followed = follow_methods(methods, bar)
        warm_up(followed, max(groups, key=len), target, options)
        for number in range(done, len(groups)):
            yield measure_group(followed, groups[number], number, target, options)
            bar.update(ends[number] - bar.n)  # turns that did not fit were not asked


def _count_turns(group: Sequence[Question]) -> int:
    return max(len(question.turns) for question in group)


def warm_up(methods: Mapping[str, Method], group: Sequence[Question], target: Target, options: Namespace) -> None:
    """Compile kernels, measure the cost curve, and let every method answer once without measuring it."""
    target.warm_up(len(group))
    _, prompts = encode_turn(open_conversations(group), 0, target, Renderer(target.tokenizer))
    room = target.context - max(map(len, prompts))
    for method in methods.values():
        method(True)(prompts, options.seed, min(WARM_UP, options.max_new_tokens, room))


def measure_group(
    methods: Mapping[str, Method], group: Sequence[Question], number: int, target: Target, options: Namespace
) -> dict[str, Any]:
    """The record of group `number` (see `rows`), with its `differences` from plain decoding's answers."""
    # The methods take turns, so that changes on the machine affect all alike.
    asks = [{name: method(False) for name, method in methods.items()} for _ in range(options.repeats)]
    conversations, renderer = open_conversations(group), Renderer(target.tokenizer)
    turns: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for turn in range(_count_turns(group)):
        asked, prompts = encode_turn(conversations, turn, target, renderer)
        if not asked:
            break
        seed = options.seed + 1000 * number + turn
        room = min(options.max_new_tokens, target.context - max(map(len, prompts)))
        found: dict[str, list[Measured]] = {name: [] for name in methods}
        for repeat, opened in enumerate(asks):
            order, first = [*methods], (number + turn + repeat) % len(methods)  # another is first
            for name in order[first:] + order[:first]:
                found[name].append(opened[name](prompts, seed, room))
        plain = found["none"][0]
        ids, results = [group[index].id for index in asked], {}
        for name, measured in found.items():
            # Peers that sample draw other texts from the same distribution.
            comparable = options.temperature == 0 or measured[0].nodes is not None
            breaks = _find_differences(target, prompts, plain, measured[0]) if comparable else {}
            same = [row not in breaks for row in range(len(ids))] if comparable else None
            results[name] = {**_describe(measured), "same": same}
            for row, difference in breaks.items():
                differences.append({"question_id": ids[row], "turn": turn, "method": name, **difference})
        turns.append({"questions": ids, "prompt_tokens": list(map(len, prompts)), "methods": results})
        for index, text in zip(asked, plain.texts or [], strict=True):
            conversations[index].add(text)
    ids = [question.id for question in group]
    return {"category": group[0].category, "questions": ids, "turns": turns, "differences": differences}


def _find_differences(target: Target, prompts: Prompts, plain: Measured, measured: Measured) -> dict[int, Any]:
    """By row, where answers leave plain decoding's, and the gap between the target's two highest logits there."""
    found = {}
    for row, pair in enumerate(zip(plain.answers, measured.answers, strict=True)):
        if pair[0] != pair[1]:
            differing = (place for place, (left, right) in enumerate(zip(*pair, strict=False)) if left != right)
            position = next(differing, min(map(len, pair)))
            logits, _ = target.open(1).extend([prompts[row] + pair[0][:position]])
            first, second = logits[0].double().topk(2).values.tolist()
            found[row] = {"position": position, "gap": first - second}  # near 0, rounding decides
    return found


def _describe(measured: Sequence[Measured]) -> dict[str, Any]:
    """One method's entry in the record of a turn: the seconds of all repeats, the rest from the first one."""
    first, parts = measured[0], [entry.parts for entry in measured if entry.parts is not None]
    return {
        "tokens": [len(answer) for answer in first.answers],
        "steps": [len(added) for added in first.added],
        "trimmed": [trim_loop(*pair) for pair in zip(first.answers, first.added, strict=True)],
        "nodes": first.nodes,
        "loops": [has_looped(answer) for answer in first.answers],
        "seconds": [entry.seconds for entry in measured],
        "parts": {part: sum(entry[part] for entry in parts) for part in parts[0]} if parts else None,
        "accepted": first.accepted,
    }


def trim_loop(answer: Sequence[int], added: Sequence[int]) -> tuple[int, int]:
    """The tokens of an answer before it repeats itself in a loop, and the forward passes which they took.

    added: the tokens of each pass. The last pass counts whole, as it does where an answer ends.
    """
    tokens = count_before_loop(answer)
    return tokens, sum(before < tokens for before in accumulate(added[:-1], initial=0))
