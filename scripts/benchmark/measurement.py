"""Measuring a group of questions with every method in turn."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, islice
from time import perf_counter
from typing import Any, TypeAlias

import torch
from tqdm import tqdm

from decode import Target
from decode.prefill import read_texts
from decode.requests.text import Tokenizer
from draftless_commands.benchmark.questions import Question
from draftless_commands.shared.prompts import encode_turn
from training.data import count_before_loop, has_looped
from training.rendering import Renderer

WARM_UP = 64  # tokens of an answer that is not measured
THINKING, ANSWER = "thinking", "answer"  # what is inside of <think>...</think>, and the rest
TAIL = 16  # tokens of a prompt, in which a chat template may open <think>


@dataclass(frozen=True)
class Measured:
    """One batch of answers: token ids (end token included), and wall time in seconds.

    added: how many tokens each forward pass of the target added to each answer. Only the project's loop knows `texts`,
    `nodes`, `parts`, the seconds of each part of the loop, and `accepted`, the accepted draft tokens by source, if the
    proposer counts them. `parts` is for CPUs only: a GPU's work is queued in one part and waited for in another.
    version: of another program.
    """

    answers: list[list[int]]
    added: list[list[int]]
    seconds: float
    texts: list[str] | None = None
    nodes: list[int] | None = None
    parts: dict[str, float] | None = None
    accepted: dict[str, int] | None = None
    version: str | None = None


TokenIds: TypeAlias = Sequence[list[int]]  # of prompts
Ask: TypeAlias = Callable[[TokenIds, int, int], Measured]  # takes prompts, seed and `max_new_tokens`
# Begins a conversation with a proposer that has learned nothing. True: it is the warm-up, whose answers are not kept.
Method: TypeAlias = Callable[[bool], Ask]


class RefusedError(ValueError):
    """Another program cannot answer, now or later; the other methods can. args: its version, and why."""


def measure_groups(
    methods: Mapping[str, Method], groups: Sequence[Sequence[Question]], done: int, target: Target, options: Namespace
) -> Iterator[dict[str, Any]]:
    """The record of each group from number `done` on, after a warm-up, and meanwhile a bar on a terminal's stderr."""
    if done == len(groups):
        return
    with tqdm(total=len(groups), initial=done, unit=" groups", disable=None) as bar:
        warm_up(methods, max(groups, key=len), target, options)
        for number in range(done, len(groups)):
            yield measure_group(methods, groups[number], number, target, options)
            bar.update()


def warm_up(methods: Mapping[str, Method], group: Sequence[Question], target: Target, options: Namespace) -> None:
    """Compile kernels, measure the cost curve, and let every method answer once without measuring it."""
    target.warm_up(len(group))
    _, prompts = encode_turn([question.conversation for question in group], 0, target, Renderer(target.tokenizer))
    room = target.context - max(map(len, prompts))
    for method in methods.values():
        with suppress(RefusedError):  # it will refuse all questions
            method(True)(prompts, options.seed, min(WARM_UP, options.max_new_tokens, room))


def measure_group(
    methods: Mapping[str, Method], group: Sequence[Question], number: int, target: Target, options: Namespace
) -> dict[str, Any]:
    """The record of group `number` (see `rows`), with its `differences` from plain decoding's answers."""
    # The methods take turns, so that changes on the machine affect all alike.
    asks = [{name: method(False) for name, method in methods.items()} for _ in range(options.repeats)]
    # All conversations continue with plain decoding's answers, so that all methods see the same prompts.
    conversations, renderer = [deepcopy(question.conversation) for question in group], Renderer(target.tokenizer)
    turns: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    record = {"category": group[0].category, "questions": [question.id for question in group], "turns": turns}
    refused: dict[str, tuple[str, str]] = {}
    for turn in range(1 + max(len(each.later) for each in conversations)):
        asked, prompts = encode_turn(conversations, turn, target, renderer)
        if not asked:
            break
        seed = options.seed + 1000 * number + turn
        room = min(options.max_new_tokens, target.context - max(map(len, prompts)))
        found: dict[str, list[Measured]] = {name: [] for name in methods}
        for repeat, opened in enumerate(asks):
            order, first = [*methods], (number + turn + repeat) % len(methods)  # another is first
            for name in order[first:] + order[:first]:
                try:
                    found[name].append(opened[name](prompts, seed, room))
                except RefusedError as error:
                    refused[name] = error.args
        plain = found["none"][0]
        ids, results = [group[index].id for index in asked], {}
        for name in (name for name in methods if name not in refused):
            measured = found[name]
            # Peers that sample draw other texts from the same distribution.
            comparable = options.temperature == 0 or measured[0].nodes is not None
            breaks = _find_differences(target, prompts, plain, measured[0]) if comparable else {}
            same = [row not in breaks for row in range(len(ids))] if comparable else None
            results[name] = {**_describe(measured, target.tokenizer, prompts), "same": same}
            for row, difference in breaks.items():
                differences.append({"question_id": ids[row], "turn": turn, "method": name, **difference})
        turns.append({"questions": ids, "prompt_tokens": list(map(len, prompts)), "methods": results})
        for index, text in zip(asked, plain.texts or [], strict=True):
            conversations[index].add(text)
    return {**record, "differences": differences, "refused": refused}


def _find_differences(target: Target, prompts: TokenIds, plain: Measured, measured: Measured) -> dict[int, Any]:
    """By row, where answers leave plain decoding's, and the gap between the target's two highest logits there."""
    found = {}
    for row, pair in enumerate(zip(plain.answers, measured.answers, strict=True)):
        if pair[0] != pair[1]:
            differing = (place for place, (left, right) in enumerate(zip(*pair, strict=False)) if left != right)
            position = next(differing, min(map(len, pair)))
            logits, _ = read_texts(target.open(1), [prompts[row] + pair[0][:position]])
            first, second = logits[0].double().topk(2).values.tolist()
            found[row] = {"position": position, "gap": first - second}  # near 0, rounding decides
    return found


def _describe(measured: Sequence[Measured], tokenizer: Tokenizer, prompts: TokenIds) -> dict[str, Any]:
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
        "lengths": count_lengths(tokenizer, prompts, first),
        **({"version": first.version} if first.version else {}),
    }


def count_lengths(tokenizer: Tokenizer, prompts: TokenIds, measured: Measured) -> dict[str, list[int]]:
    """By part of the answers, `THINKING` and `ANSWER`: entry n counts the forward passes with n accepted draft tokens.

    The last token of each pass counts as the model's own, and the passes of prompts are left out. A pass belongs to the
    part in which it begins.
    """
    counted: dict[str, Counter[int]] = {}
    for prompt, answer, added in zip(prompts, measured.answers, measured.added, strict=True):
        text, tokens = "", iter([*prompt[-TAIL:], *answer])
        for number, length in enumerate((len(prompt[-TAIL:]), *added)):
            if number > 1:
                part = THINKING if text.rfind("<think>") > text.rfind("</think>") else ANSWER
                counted.setdefault(part, Counter())[length - 1] += 1
            text += "".join(tokenizer.decode([token]) for token in islice(tokens, length))
    return {part: [counts[n] for n in range(max(counts) + 1)] for part, counts in counted.items()}


def trim_loop(answer: Sequence[int], added: Sequence[int]) -> tuple[int, int]:
    """The tokens of an answer before it repeats itself in a loop, and the forward passes which they took.

    added: the tokens of each pass. The last pass counts whole, as it does where an answer ends.
    """
    tokens = count_before_loop(answer)
    return tokens, sum(before < tokens for before in accumulate(added[:-1], initial=0))


def clock(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of `work`, and its seconds, GPU work included."""
    wait = torch.get_device_module(device).synchronize
    wait(device)
    begun, result = perf_counter(), work()
    wait(device)
    return result, perf_counter() - begun
