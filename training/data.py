"""Conversations to train on: read, put through the chat template, and split into training and validation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

LOOP_TOKENS, LOOP_PERIOD = 60, 20  # a text whose last 60 tokens repeat with a period under 20 has fallen into a loop
HELD_OUT = 50  # one prompt of so many is kept for validation
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Example:
    """One conversation as tokens; `spans` are the answers' (begin, end) in them."""

    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def answer_tokens(self) -> int:
        return sum(end - begin for begin, end in self.spans)


@dataclass(frozen=True)
class Dataset:
    """Examples to train on, and prompts (token ids) for validation of which none is among them."""

    examples: list[Example]
    prompts: list[list[int]]
    dropped: int  # answers that had fallen into a loop

    @property
    def answer_tokens(self) -> int:
        return sum(example.answer_tokens for example in self.examples)


def load_dataset(files: Sequence[Path], tokenizer: Any, max_length: int, prompts: int) -> Dataset:
    """Read JSONL files of conversations: `prompt` and `response`, or `messages` that end with an answer.

    Every prompt whose digest says so is held out; the first `prompts` of them, in the digest's order, are kept for
    validation. Examples are cut at `max_length` tokens. Raises ValueError, with file and line, for a line that is not
    such a conversation or has no answer tokens, and where nothing is left to train on.
    """
    examples, held_out, dropped = [], {}, 0
    for place, messages, finished in tqdm(list(_read(files)), desc="tokenizing", unit=" answers", leave=False):
        digest = hashlib.sha256(messages[0]["content"].encode()).digest()
        example = tokenize(messages, tokenizer, finished, place)
        if int.from_bytes(digest[:4]) % HELD_OUT == 0:
            held_out[digest] = list(example.tokens[: example.spans[0][0]])
        elif has_looped(example.tokens[: example.spans[-1][1]]):
            dropped += 1
        elif example.spans[0][0] < max_length:
            spans = tuple((begin, min(end, max_length)) for begin, end in example.spans if begin < max_length)
            examples.append(Example(example.tokens[:max_length], spans))
    if not examples:
        raise ValueError(f"{', '.join(map(str, files))}: nothing is left to train on ({dropped} answers were loops)")
    chosen = [held_out[digest] for digest in sorted(held_out) if len(held_out[digest]) < max_length]
    return Dataset(examples, chosen[:prompts], dropped)


def tokenize(messages: Messages, tokenizer: Any, finished: bool, place: str) -> Example:
    """A conversation in the tokenizer's chat template; without a template, the texts one after the other.

    What an answer adds is found by rendering the conversation without it and with it, since few templates mark it.
    An answer ends with its end token; one that was not `finished` ends with its last word.
    """
    tokens: list[int] = []
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(messages[:turn], tokenizer, answer_next=True)
        whole = _render(messages[: turn + 1], tokenizer, answer_next=False)
        if whole[: len(before)] != before:
            raise ValueError(f"{place}: the chat template changes what was said before an answer; it cannot be masked")
        end = len(whole)
        while end > len(before) and tokenizer.chat_template and whole[end - 1] != tokenizer.eos_token_id:
            end -= 1  # what a template adds behind the end token is nobody's answer
        if tokenizer.chat_template and end == len(before):
            end = len(whole)  # this template ends an answer with no token of its own
        elif tokenizer.chat_template and not finished and turn == len(messages) - 1:
            end -= 1
        tokens = whole[:end]
        if end == len(before) or not message["content"].strip():
            raise ValueError(f"{place}: the answer has no tokens")
        spans.append((max(len(before), 1), end))  # nothing says what the very first token would be
    return Example(tuple(tokens), tuple(spans))


def has_looped(tokens: Sequence[int]) -> bool:
    """Whether the text has fallen into a loop: its last tokens repeat with a short period."""
    tail = list(tokens[-LOOP_TOKENS:])
    return len(tail) == LOOP_TOKENS and any(tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD))


def _render(messages: Messages, tokenizer: Any, answer_next: bool) -> list[int]:
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=answer_next, return_dict=False)
    text = "".join(message["content"] for message in messages)
    ends = [] if answer_next or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tokenizer(text).input_ids + ends


def _read(files: Sequence[Path]) -> Iterator[tuple[str, Messages, bool]]:
    """Place, messages and whether the last answer came to its end, of every row of the files."""
    for file in files:
        rows = 0
        for number, line in enumerate(_text(file).split("\n"), start=1):
            if not line.strip():
                continue
            rows += 1
            place = f"{file}, line {number}"
            row = _parse(line, place)
            if "dropped" not in row:
                yield place, _messages(row, place), bool(row.get("finished", True))
        if rows == 0:
            raise ValueError(f"{file} is empty; it needs one JSON object a line")


def _text(file: Path) -> str:
    raw = file.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}, line {number}: this is not UTF-8 text") from error


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: this is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f'{place}: a line is a JSON object with "prompt" and "response", or with "messages"')
    return row


def _messages(row: dict[str, Any], place: str) -> Messages:
    if "messages" in row:
        messages = row["messages"]
    elif "prompt" in row and "response" in row:
        messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    else:
        raise ValueError(f'{place}: a line needs "prompt" and "response", or "messages"')
    fits = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    )
    if not fits or not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f'{place}: a conversation has texts with roles, of which one is an "assistant" answer')
    while messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    return messages
