"""Conversations to train on: read, put through the chat template, and split into training and validation."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from training.json_lines import read_lines

LOOP_TOKENS, LOOP_PERIOD = 60, 20  # a text whose last 60 tokens repeat with a period under 20 has fallen into a loop
HELD_OUT = 50  # one prompt of so many is kept for validation,
FEWEST = 10  # and one at least of so many or more
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
    too_long: int  # prompts that left no room for an answer

    @property
    def answer_tokens(self) -> int:
        return sum(example.answer_tokens for example in self.examples)


def load_dataset(
    files: Sequence[Path], tokenizer: Any, max_length: int, prompts: int, ends: Collection[int] = ()
) -> Dataset:
    """Read JSONL files of conversations: `prompt` and `response`, or `messages` that end with an answer.

    Every prompt whose digest says so is held out, and of ten or more at least one; the first `prompts` of them, in the
    digest's order, are kept for validation. Examples are cut at `max_length` tokens. ends: tokens that end an answer,
    beside the tokenizer's own. Raises ValueError, with file and line, for a line that is not such a conversation or has
    no answer tokens, and where nothing is left to train on.
    """
    examples, held_out, dropped, too_long = [], {}, 0, 0
    rows = [(_digest(messages), place, messages, finished) for place, messages, finished in _read(files)]
    chosen = _hold_out({digest for digest, *_ in rows})
    shown = tqdm(rows, desc="tokenizing", unit=" answers", leave=False, disable=None)
    for digest, place, messages, finished in shown:
        example = tokenize(messages, tokenizer, finished, place, ends)
        begin = example.spans[0][0]
        if digest in chosen:
            held_out[digest] = list(example.tokens[:begin])
        elif has_looped(example.tokens) or has_looped(example.tokens[:-1]):  # its end token may follow
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
    kept = [held_out[digest] for digest in sorted(held_out) if len(held_out[digest]) < max_length]
    return Dataset(examples, kept[:prompts], dropped, too_long)


def _hold_out(digests: set[bytes]) -> set[bytes]:
    """Those of prompts for validation: one of `HELD_OUT`, the same ones whatever else there is."""
    chosen = {digest for digest in digests if int.from_bytes(digest[:4]) % HELD_OUT == 0}
    return chosen or ({min(digests)} if len(digests) >= FEWEST else set())


def tokenize(messages: Messages, tokenizer: Any, finished: bool, place: str, ends: Collection[int] = ()) -> Example:
    """A conversation in the tokenizer's chat template; without a template, the texts one after the other.

    What an answer adds is found by rendering the conversation without it and with it, since few templates mark it.
    It ends with its end token: what a template adds behind that is nobody's. If the last one was not `finished`, it
    ends with its last word. Earlier answers count as far as the whole conversation still has them: many templates
    leave out old thoughts.
    """
    ends = {tokenizer.eos_token_id, *ends}
    tokens: list[int] = []
    spans: list[tuple[int, int]] = []
    for turn in _answers(messages):
        last = turn == len(messages) - 1
        before = _render(messages[:turn], tokenizer, place, answer_next=True)
        whole = _render(messages[: turn + 1], tokenizer, place, answer_next=False)
        if last and not tokenizer.chat_template and tokenizer.eos_token_id is not None:
            whole.append(tokenizer.eos_token_id)
        begin = max(_count_common(before, whole), 1)  # nothing says what the very first token would be
        if begin < len(before) and tokenizer.chat_template:
            raise ValueError(f"{place}: the chat template changes what was said before an answer; it cannot be masked")
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
    """Whether a text has fallen into a loop: its last 60 tokens repeat with a period under 20."""
    tail = list(tokens[-LOOP_TOKENS:])
    return len(tail) == LOOP_TOKENS and any(tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD))


def _answers(messages: Messages) -> list[int]:
    """Which messages are the model's answers; one that nobody asked for is none."""
    return [turn for turn, message in enumerate(messages) if turn > 0 and message["role"] == "assistant"]


def _digest(messages: Messages) -> bytes:
    """Tells prompts apart: all that was said before the first answer."""
    asked = messages[: _answers(messages)[0]]
    return hashlib.sha256("\n".join(message["content"] for message in asked).encode()).digest()


def _render(messages: Messages, tokenizer: Any, place: str, answer_next: bool) -> list[int]:
    if not tokenizer.chat_template:
        return tokenizer("".join(message["content"] for message in messages)).input_ids
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=answer_next, return_dict=False)
    except Exception as error:  # a template is a program: it may refuse a role, or stumble
        raise ValueError(f"{place}: the chat template cannot render this conversation ({error})") from error


def _count_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _read(files: Sequence[Path]) -> Iterator[tuple[str, Messages, bool]]:
    """Place, messages and whether the last answer came to its end, of every row of the files."""
    for file in files:
        for number, row in read_lines(file):
            place = f"{file}, line {number}"
            if "dropped" not in row:
                yield place, _messages(row, place), bool(row.get("finished", True))


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
    if not fits or not _answers(messages):
        raise ValueError(f'{place}: a conversation has texts with roles, of which one is the "assistant"\'s answer')
    messages = messages[: _answers(messages)[-1] + 1]
    try:
        "".join(message["content"] for message in messages).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: the text has half of a character (a surrogate)") from error
    return messages
