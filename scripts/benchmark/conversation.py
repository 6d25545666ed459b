"""One group of questions asked of every method in turn, so that what changes on the machine meets them all alike."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decode import Target
from decode.text import Tokenizer, encode
from scripts.benchmark.methods import Ask, Measured, Method, top_gap
from scripts.benchmark.questions import Question
from training.data import has_looped

WARM_UP = 64  # tokens an answer that is not measured


@dataclass(frozen=True)
class Plan:
    """How often and how far each question is answered. The seed of an answer depends on its question alone."""

    repeats: int
    max_new_tokens: int
    temperature: float
    seed: int


@dataclass
class Conversation:
    """A question, and what was said so far; the answers are the plain loop's, whoever is asked."""

    question: Question
    said: list[str]

    def encode(self, tokenizer: Tokenizer | None) -> list[int]:
        """The tokens of the next turn. Where there is no chat template the texts stand below each other."""
        texts = [*self.said, self.question.turns[len(self.said) // 2]]
        if tokenizer is not None and tokenizer.chat_template is None:
            return encode("\n\n".join(texts), tokenizer, False)
        roles = ("user", "assistant") * len(texts)
        return encode(
            [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)], tokenizer, None
        )


def check_prompts(questions: Sequence[Question], target: Target) -> None:
    """Raise ValueError where a first turn leaves no room for an answer."""
    for question in questions:
        length = len(Conversation(question, []).encode(target.tokenizer))
        if length >= target.context:
            raise ValueError(
                f"question {question.id} has {length} tokens; the model's context of {target.context} leaves no room "
                "for an answer"
            )


def warm_up(methods: Mapping[str, Method], group: Sequence[Question], target: Target, plan: Plan) -> None:
    """Let every method answer once without being measured, and measure beforehand the costs that proposers ask for."""
    target.warm_up(len(group))
    prompts = [Conversation(question, []).encode(target.tokenizer) for question in group]
    for method in methods.values():
        method.open()(prompts, plan.seed, min(WARM_UP, _find_room(prompts, target, plan)))


def measure_group(
    methods: Mapping[str, Method], group: Sequence[Question], place: int, target: Target, plan: Plan
) -> dict[str, Any]:
    """The record of one group (see `bench_rows`), and in it the `differences` from the plain loop's answers.

    place: the group's number; the methods take turns at being the first.
    """
    asks = {(name, repeat): method.open() for repeat in range(plan.repeats) for name, method in methods.items()}
    talks = [Conversation(question, []) for question in group]
    turns: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for turn in range(max(len(question.turns) for question in group)):
        talks = [talk for talk in talks if turn < len(talk.question.turns) and _fits(talk, target)]
        if not talks:
            break
        prompts = [talk.encode(target.tokenizer) for talk in talks]
        seed, room = plan.seed + 1000 * place + turn, _find_room(prompts, target, plan)
        found = _ask_all(asks, place + turn, prompts, seed, room)
        breaks = {name: _compare(target, prompts, found["none"][0], found[name][0], plan) for name in methods}
        ids = [talk.question.id for talk in talks]
        results = {name: _describe(found[name], breaks[name]) for name in methods}
        turns.append({"questions": ids, "prompt_tokens": list(map(len, prompts)), "methods": results})
        differences += [
            {"question_id": number, "turn": turn, "method": name, **difference}
            for name in methods
            for number, difference in zip(ids, breaks[name] or [], strict=False)
            if difference is not None
        ]
        for talk, text in zip(talks, found["none"][0].texts or [], strict=True):
            talk.said += [talk.question.turns[turn], text]
    ids = [question.id for question in group]
    return {"category": group[0].category, "questions": ids, "turns": turns, "differences": differences}


def _fits(talk: Conversation, target: Target) -> bool:
    """Whether the next turn leaves room for an answer; a later turn that does not is left out for every method."""
    if len(talk.encode(target.tokenizer)) < target.context:
        return True
    number = len(talk.said) // 2 + 1
    print(f"bench.py: question {talk.question.id} outgrew the context before turn {number}", file=sys.stderr)
    return False


def _find_room(prompts: Sequence[list[int]], target: Target, plan: Plan) -> int:
    """New tokens that every prompt of a batch, and every method alike, has room for."""
    return min(plan.max_new_tokens, target.context - max(map(len, prompts)))


def _ask_all(
    asks: Mapping[tuple[str, int], Ask], shift: int, prompts: Sequence[list[int]], seed: int, room: int
) -> dict[str, list[Measured]]:
    """Every repeat of every method; who is the first changes from repeat to repeat and from question to question."""
    names = list(dict.fromkeys(name for name, _ in asks))
    found: dict[str, list[Measured]] = {name: [] for name in names}
    for repeat in range(len(asks) // len(names)):
        first = (shift + repeat) % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(asks[name, repeat](prompts, seed, room))
    return found


def _compare(
    target: Target, prompts: Sequence[list[int]], plain: Measured, measured: Measured, plan: Plan
) -> list[dict[str, Any] | None] | None:
    """For each prompt None, or where the answer leaves the plain loop's and how near a tie the target was there.

    None altogether for peers that sample: they draw from the same law, but not the same text.
    """
    if plan.temperature > 0 and measured.nodes is None:
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
    """One method's entry in the record of a turn: times of all repeats, the rest of the first one."""
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
