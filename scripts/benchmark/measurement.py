"""Measuring one group of questions with every method in turn, so that changes on the machine affect all alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from decode import Target
from scripts.benchmark.methods import Measured, Method, measure_gap
from scripts.benchmark.options import BenchOptions
from scripts.benchmark.questions import Question
from scripts.shared.prompts import ask, encode_turn
from training.conversations import Conversation
from training.data import count_before_loop, has_looped
from training.rendering import Renderer

WARM_UP = 64  # tokens of an answer that is not measured


def open_conversations(questions: Sequence[Question]) -> list[Conversation]:
    """Conversations whose answers will be plain decoding's, so that all methods see the same prompts."""
    return [ask(question.turns, f"question {question.id}") for question in questions]


def warm_up(methods: Mapping[str, Method], group: Sequence[Question], target: Target, options: BenchOptions) -> None:
    """Compile kernels, measure the cost curve, and let every method answer once without measuring it."""
    target.warm_up(len(group))
    _, prompts = encode_turn(open_conversations(group), 0, target, Renderer(target.tokenizer))
    for method in methods.values():
        method(True)(prompts, options.seed, min(WARM_UP, _find_room(prompts, target, options)))


def measure_group(
    methods: Mapping[str, Method], group: Sequence[Question], number: int, target: Target, options: BenchOptions
) -> dict[str, Any]:
    """The record of group `number` (see `rows`), with its `differences` from plain decoding's answers."""
    asks = [{name: method(False) for name, method in methods.items()} for _ in range(options.repeats)]
    conversations, renderer = open_conversations(group), Renderer(target.tokenizer)
    turns: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for turn in range(max(len(question.turns) for question in group)):
        asked, prompts = encode_turn(conversations, turn, target, renderer)
        if not asked:
            break
        seed, room = options.seed + 1000 * number + turn, _find_room(prompts, target, options)
        found: dict[str, list[Measured]] = {name: [] for name in methods}
        for repeat, opened in enumerate(asks):
            order = deque(methods)
            order.rotate(-(number + turn + repeat))  # another method is first each time
            for name in order:
                found[name].append(opened[name](prompts, seed, room))
        plain = found["none"][0]
        ids, results = [group[index].id for index in asked], {}
        for name, measured in found.items():
            # Peers that sample draw other texts from the same distribution.
            comparable = options.temperature == 0 or measured[0].nodes is not None
            breaks = _compare(target, prompts, plain, measured[0]) if comparable else None
            results[name] = _describe(measured, breaks)
            for question, difference in zip(ids, breaks or [], strict=False):
                if difference is not None:
                    differences.append({"question_id": question, "turn": turn, "method": name, **difference})
        turns.append({"questions": ids, "prompt_tokens": list(map(len, prompts)), "methods": results})
        for index, text in zip(asked, plain.texts or [], strict=True):
            conversations[index].add(text)
    ids = [question.id for question in group]
    return {"category": group[0].category, "questions": ids, "turns": turns, "differences": differences}


def _find_room(prompts: Sequence[list[int]], target: Target, options: BenchOptions) -> int:
    """The number of new tokens that every prompt of a batch has room for."""
    return min(options.max_new_tokens, target.context - max(map(len, prompts)))


def _compare(
    target: Target, prompts: Sequence[list[int]], plain: Measured, measured: Measured
) -> list[dict[str, Any] | None]:
    """For each prompt None, or the position where the answer leaves plain decoding's and the target's gap there."""
    differences: list[dict[str, Any] | None] = [None] * len(prompts)
    for index, (expected, answer) in enumerate(zip(plain.answers, measured.answers, strict=True)):
        if answer != expected:
            pairs = enumerate(zip(expected, answer, strict=False))
            position = next((at for at, (left, right) in pairs if left != right), min(len(expected), len(answer)))
            gap = measure_gap(target, prompts[index] + expected[:position])
            differences[index] = {"position": position, "gap": gap}
    return differences


def _describe(measured: Sequence[Measured], differences: Sequence[Any] | None) -> dict[str, Any]:
    """One method's entry in the record of a turn: the seconds of all repeats, the rest from the first one."""
    first = measured[0]
    parts = [entry.parts for entry in measured if entry.parts is not None]
    return {
        "tokens": list(map(len, first.answers)),
        "steps": list(map(len, first.added)),
        "trimmed": [trim_loop(*pair) for pair in zip(first.answers, first.added, strict=True)],
        "nodes": first.nodes,
        "loops": list(map(has_looped, first.answers)),
        "same": None if differences is None else [difference is None for difference in differences],
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
