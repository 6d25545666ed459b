"""Training data: conversations from JSON Lines files, tokenized and split into training and validation."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from training.json_lines import read_lines

LOOP_TOKENS, LOOP_PERIOD = 60, 20
VALIDATION_SHARE = 50  # one prompt in this many is held out for validation,
MIN_PROMPTS = 10  # and at least one if there are this many
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Example:
    """One tokenized conversation."""

    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]  # the (begin, end) positions of its answers

    @property
    def answer_tokens(self) -> int:
        return sum(end - begin for begin, end in self.spans)


@dataclass(frozen=True)
class Dataset:
    """Training examples, and held-out validation prompts as token ids."""

    examples: list[Example]
    prompts: list[list[int]]
    dropped: int  # answers that end in a loop
    too_long: int  # prompts that leave no room for an answer

    @property
    def answer_tokens(self) -> int:
        return sum(example.answer_tokens for example in self.examples)


def load_dataset(
    files: Sequence[Path], tokenizer: Any, max_length: int, prompts: int, ends: Collection[int] = ()
) -> Dataset:
    """The conversations in JSON Lines files: rows with `prompt` and `response`, or with `messages`.

    A hash of the prompt decides which are held out; the first `prompts` of them, in hash order, are for validation.
    Examples are cut at `max_length` tokens. ends: tokens that end an answer, in addition to the tokenizer's EOS. Raises
    ValueError, with file and line, if a row is no conversation or its answer is empty, or if no example is left.
    """
    examples, held_out, dropped, too_long = [], {}, 0, 0
    lines = ((f"{file}, line {number}", row) for file in files for number, row in read_lines(file))
    parsed = ((place, _parse_messages(row, place), row) for place, row in lines if "dropped" not in row)
    rows = [(_hash_prompt(messages), place, messages, row.get("finished", True)) for place, messages, row in parsed]
    digests = {digest for digest, *_ in rows}  # a prompt is held out or not, whatever other data there is
    chosen = {digest for digest in digests if int.from_bytes(digest[:4]) % VALIDATION_SHARE == 0}
    if not chosen and len(digests) >= MIN_PROMPTS:
        chosen = {min(digests)}
    for digest, place, messages, finished in tqdm(rows, "tokenizing", unit=" answers", leave=False, disable=None):
        example = tokenize(messages, tokenizer, finished, place, ends)
        begin = example.spans[0][0]
        if digest in chosen:
            held_out[digest] = list(example.tokens[:begin])
        elif has_looped(example.tokens) or has_looped(example.tokens[:-1]):  # an end token may follow the loop
            dropped += 1
        elif begin >= max_length:
            too_long += 1
        else:
            spans = tuple((begin, min(end, max_length)) for begin, end in example.spans if begin < max_length)
            examples.append(Example(example.tokens[:max_length], spans))
    if not examples:
        raise ValueError(
            f"{', '.join(map(str, files))}: nothing is left to train on ({dropped} answers were loops, {too_long} "
            f"prompts were longer than {max_length} tokens, {len(held_out)} prompts are held out for validation)"
        )
    kept = [tokens for _, tokens in sorted(held_out.items()) if len(tokens) < max_length]
    return Dataset(examples, kept[:prompts], dropped, too_long)


def tokenize(messages: Messages, tokenizer: Any, finished: bool, place: str, ends: Collection[int] = ()) -> Example:
    """A conversation in the tokenizer's chat template; without a template, its texts joined.

    Few templates mark answers: each answer is found by rendering the conversation without and with it. It ends with
    its end token, and the last one only if it is `finished`. Parts of earlier answers that a template removes
    (thoughts) are not counted. Raises ValueError, naming the place, if the template fails or hides an answer's begin.
    """
    ends = {tokenizer.eos_token_id, *ends}
    tokens: list[int] = []
    spans: list[tuple[int, int]] = []
    for turn in _list_answers(messages):
        last = turn == len(messages) - 1
        before = _render(messages[:turn], tokenizer, place, answer_next=True)
        whole = _render(messages[: turn + 1], tokenizer, place, answer_next=False)
        if last and not tokenizer.chat_template and tokenizer.eos_token_id is not None:
            whole.append(tokenizer.eos_token_id)
        begin = max(_count_common(before, whole), 1)  # no position predicts the very first token
        if begin < len(before) and tokenizer.chat_template:
            raise ValueError(f"{place}: the chat template changes the text before an answer; it cannot be masked")
        end = next((index + 1 for index in range(begin, len(whole)) if whole[index] in ends), len(whole))
        if last and not finished and whole[end - 1] in ends:
            end -= 1
        if end <= begin:
            raise ValueError(f"{place}: the answer has no tokens")
        kept = _count_common(tokens, whole)
        spans = [(first, min(past, kept)) for first, past in spans if first < kept] + [(begin, end)]
        tokens = whole[:end]
    return Example(tuple(tokens), tuple(spans))


def has_looped(tokens: Sequence[int]) -> bool:
    """Whether a text ends in a loop: its last 60 tokens repeat with a period under 20."""
    return _find_period(tokens[-LOOP_TOKENS:]) > 0


def count_before_loop(tokens: Sequence[int]) -> int:
    """The tokens of a text up to the first one that a loop (as in `has_looped`) repeats; all of them without a loop."""
    for begin in range(len(tokens) - LOOP_TOKENS + 1):
        if period := _find_period(tokens[begin : begin + LOOP_TOKENS]):
            return begin + period
    return len(tokens)


def _find_period(tokens: Sequence[int]) -> int:
    """The shortest period under 20 of 60 tokens; 0 if there is none, and for fewer tokens."""
    if len(tokens) < LOOP_TOKENS:
        return 0
    return next((period for period in range(1, LOOP_PERIOD) if tokens[period:] == tokens[:-period]), 0)


def choose_draft_vocabulary(examples: Sequence[Example], vocab_size: int, size: int) -> Tensor:
    """The `size` tokens most frequent in answers, ascending, as in EAGLE-3. Ties go to the lower ids."""
    counts = Counter(token for one in examples for begin, end in one.spans for token in one.tokens[begin:end])
    chosen = sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:size]
    return torch.tensor(sorted(chosen))


def _list_answers(messages: Messages) -> list[int]:
    """The indices of the model's answers; a first message is never an answer."""
    return [turn for turn, message in enumerate(messages) if turn > 0 and message["role"] == "assistant"]


def _hash_prompt(messages: Messages) -> bytes:
    """A hash of everything before the first answer."""
    asked = messages[: _list_answers(messages)[0]]
    return hashlib.sha256("\n".join(message["content"] for message in asked).encode()).digest()


def _render(messages: Messages, tokenizer: Any, place: str, answer_next: bool) -> list[int]:
    if not tokenizer.chat_template:
        return tokenizer("".join(message["content"] for message in messages)).input_ids
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=answer_next, return_dict=False)
    except Exception as error:  # a template is a program: it may refuse a role, or crash
        raise ValueError(f"{place}: the chat template cannot render this conversation ({error})") from error


def _count_common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _parse_messages(row: dict[str, Any], place: str) -> Messages:
    if "messages" in row:
        messages = row["messages"]
    elif "prompt" in row and "response" in row:
        messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    else:
        raise ValueError(f'{place}: a line needs "prompt" and "response", or "messages"')
    valid = isinstance(messages, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
        for message in messages
    )
    if not valid or not _list_answers(messages):
        raise ValueError(f'{place}: a conversation is a list of texts with roles, with an answer by "assistant"')
    messages = messages[: _list_answers(messages)[-1] + 1]
    try:
        "".join(message["content"] for message in messages).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: the text contains half a character (a surrogate)") from error
    return messages
