"""Measuring one group of questions with every method in turn, so that changes on the machine affect all alike."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decode import Target
from decode.text import Tokenizer, encode
from scripts.benchmark.methods import Ask, Measured, Method, top_gap
from scripts.benchmark.options import BenchOptions
from scripts.benchmark.questions import Question
from scripts.shared.prompts import encode_turns
from training.data import has_looped

WARM_UP = 64  # tokens of an answer that is not measured


@dataclass
class Conversation:
    """A question with its turns so far: texts of user and model. The answers are plain decoding's, for every method."""

    question: Question
    texts: list[str]

    def encode(self, tokenizer: Tokenizer | None) -> list[int]:
        """The tokens of the next turn. Without a chat template, the texts are separated by empty lines."""
        texts = [*self.texts, self.question.turns[len(self.texts) // 2]]
        if tokenizer is not None and tokenizer.chat_template is None:
            return encode("\n\n".join(texts), tokenizer, False)
        return encode_turns(texts, tokenizer, None)


def check_prompts(questions: Sequence[Question], target: Target) -> None:
    """Raise ValueError if a first turn leaves no room for an answer."""
    for question in questions:
        length = len(Conversation(question, []).encode(target.tokenizer))
        if length >= target.context:
            raise ValueError(
                f"question {question.id} has {length} tokens; the model's context of {target.context} leaves no room "
                "for an answer"
            )


def warm_up(methods: Mapping[str, Method], group: Sequence[Question], target: Target, options: BenchOptions) -> None:
    """Compile kernels, measure the cost curve, and let every method answer once without measuring it."""
    target.warm_up(len(group))
    prompts = [Conversation(question, []).encode(target.tokenizer) for question in group]
    for method in methods.values():
        method()(prompts, options.seed, min(WARM_UP, _find_room(prompts, target, options)))


def measure_group(
    methods: Mapping[str, Method], group: Sequence[Question], number: int, target: Target, options: BenchOptions
) -> dict[str, Any]:
    """The record of one group (see `rows`), with its `differences` from plain decoding's answers.

    number: the group's; it decides which method is first.
    """
    asks = {(name, repeat): method() for repeat in range(options.repeats) for name, method in methods.items()}
    talks = [Conversation(question, []) for question in group]
    turns: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for turn in range(max(len(question.turns) for question in group)):
        talks = [talk for talk in talks if turn < len(talk.question.turns) and _fits(talk, target)]
        if not talks:
            break
        prompts = [talk.encode(target.tokenizer) for talk in talks]
        seed, room = options.seed + 1000 * number + turn, _find_room(prompts, target, options)
        found = _ask_all(asks, number + turn, prompts, seed, room)
        breaks = {name: _compare(target, prompts, found["none"][0], found[name][0], options) for name in methods}
        ids = [talk.question.id for talk in talks]
        results = {name: _describe(found[name], breaks[name]) for name in methods}
        turns.append({"questions": ids, "prompt_tokens": list(map(len, prompts)), "methods": results})
        differences += [
            {"question_id": question, "turn": turn, "method": name, **difference}
            for name in methods
            for question, difference in zip(ids, breaks[name] or [], strict=False)
            if difference is not None
        ]
        for talk, text in zip(talks, found["none"][0].texts or [], strict=True):
            talk.texts += [talk.question.turns[turn], text]
    ids = [question.id for question in group]
    return {"category": group[0].category, "questions": ids, "turns": turns, "differences": differences}


def _fits(talk: Conversation, target: Target) -> bool:
    """Whether the next turn leaves room for an answer; otherwise it is skipped for every method."""
    if len(talk.encode(target.tokenizer)) < target.context:
        return True
    number = len(talk.texts) // 2 + 1
    print(f"bench.py: question {talk.question.id} outgrew the context before turn {number}", file=sys.stderr)
    return False


def _find_room(prompts: Sequence[list[int]], target: Target, options: BenchOptions) -> int:
    """The number of new tokens that every prompt of a batch has room for."""
    return min(options.max_new_tokens, target.context - max(map(len, prompts)))


def _ask_all(
    asks: Mapping[tuple[str, int], Ask], shift: int, prompts: Sequence[list[int]], seed: int, room: int
) -> dict[str, list[Measured]]:
    """Every repeat of every method; the first method changes with each repeat and question."""
    names = list(dict.fromkeys(name for name, _ in asks))
    found: dict[str, list[Measured]] = {name: [] for name in names}
    for repeat in range(len(asks) // len(names)):
        first = (shift + repeat) % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(asks[name, repeat](prompts, seed, room))
    return found


def _compare(
    target: Target, prompts: Sequence[list[int]], plain: Measured, measured: Measured, options: BenchOptions
) -> list[dict[str, Any] | None] | None:
    """For each prompt None, or the position where the answer leaves plain decoding's and the gap of `top_gap` there.

    None for peers that sample: they draw other texts from the same distribution.
    """
    if options.temperature > 0 and measured.nodes is None:
        return None
    differences: list[dict[str, Any] | None] = []
    for prompt, wanted, answer in zip(prompts, plain.answers, measured.answers, strict=True):
        if answer == wanted:
            differences.append(None)
            continue
        pairs = enumerate(zip(wanted, answer, strict=False))
        position = next((at for at, (left, right) in pairs if left != right), min(len(wanted), len(answer)))
        differences.append({"position": position, "gap": top_gap(target, prompt + wanted[:position])})
    return differences


def _describe(measured: Sequence[Measured], differences: Sequence[Any] | None) -> dict[str, Any]:
    """One method's entry in the record of a turn: the seconds of all repeats, the rest from the first one."""
    first = measured[0]
    parts = [entry.parts for entry in measured if entry.parts is not None]
    return {
        "tokens": list(map(len, first.answers)),
        "steps": first.steps,
        "nodes": first.nodes,
        "loops": list(map(has_looped, first.answers)),
        "same": None if differences is None else [difference is None for difference in differences],
        "seconds": [entry.seconds for entry in measured],
        "parts": {part: sum(entry[part] for entry in parts) for part in parts[0]} if parts else None,
    }
