"""Training data: conversations from JSON Lines files, tokenized and split into training and validation."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from training.conversations import FLAGS, Conversation, Message, is_blank, list_answers, read_conversation, read_lines
from training.rendering import Renderer, Texts

LOOP_TOKENS, LOOP_PERIOD = 60, 20
LARGE_VOCABULARY = 1 << 16  # above it, a new head drafts a part of the tokens ...
COVERAGE, SMALLEST_DRAFT, LARGEST_DRAFT = 0.98, 1 << 13, 1 << 15  # ... of this share of answers' tokens and size
VALIDATION_SHARE = 50  # one prompt in this many is held out for validation,
MIN_PROMPTS = 10  # and at least one if there are this many
MAX_BAD = 0.1  # share of the rows
SHOWN = 3  # bad rows that are named
TOKENS, VOCABULARY = "token_ids", "vocabulary"  # keys of a distilled row


@dataclass(frozen=True)
class Example:
    """The tokens of one conversation, or of one of its turns."""

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
    held_out: int  # prompts that are not trained on; `prompts` are some of them
    bad: str = ""  # the rows that were skipped and why, and how many other answers were empty

    @property
    def answer_tokens(self) -> int:
        return sum(example.answer_tokens for example in self.examples)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that depend on all examples."""
        digest = hashlib.sha256()
        for example in self.examples:  # one by one: the text of all would be as large as the data
            digest.update(repr(example).encode())
        return digest.hexdigest()[:16]


def load_dataset(
    files: Sequence[Path],
    renderer: Renderer,
    max_length: int,
    prompts: int,
    *,
    max_bad: float = MAX_BAD,
    use_text: bool = False,
) -> Dataset:
    """The answers in JSON Lines files: the token ids of distilled rows, or else the rendered texts.

    A hash of the prompt decides which are held out; the first `prompts` of them, in hash order, are for validation.
    Examples are cut at `max_length` tokens. A row that cannot be trained on is skipped. An answer that is empty or ends
    in a loop is not trained on; it stays in the prompts of later ones. use_text: ignores token ids.
    Raises ValueError if more than `max_bad` of the rows are bad, if token ids are of another vocabulary, or if no
    example is left.
    """
    rows, bad = read_rows(files, max_bad)
    count = len(rows) + len(bad)
    found: list[tuple[bytes, list[Example]]] = []
    empty = 0
    for conversation in tqdm(rows, "tokenizing", unit=" answers", leave=False, disable=None):
        row = conversation.fields
        if TOKENS in row and not use_text and row.get(VOCABULARY) != renderer.vocabulary:
            raise ValueError(
                f"{conversation.place}: the token ids are of another vocabulary (fingerprint {row.get(VOCABULARY)}, "
                f"the model's is {renderer.vocabulary}); distil with this model, or give --use-text to train on the "
                "text"
            )
        try:
            if made := make_examples(conversation, renderer, use_text):
                found.append((_hash_prompt(conversation), made))
                empty += sum(map(is_blank, _list_written(conversation, use_text)))
        except ValueError as error:
            bad.append(str(error))
    described = _refuse_bad(bad, count, max_bad)
    left_out = [*([described] if described else []), *([f"empty answers in other rows: {empty}"] if empty else [])]
    return replace(_split(found, files, renderer, max_length, prompts), bad="; ".join(left_out))


def read_rows(files: Sequence[Path], max_bad: float = MAX_BAD) -> tuple[list[Conversation], list[str]]:
    """The conversations with answers in JSON Lines files, and what is wrong with other rows, but for dropped ones.

    Raises ValueError if more than `max_bad` of the rows are bad.
    """
    bad: list[str] = []
    read = [(f"{file}, line {line}", row) for file in files for line, row in read_lines(file, bad)]
    rows = []
    for place, row in read:
        try:
            if "dropped" not in row:
                rows.append(read_conversation(row, place, answered=True))
        except ValueError as error:
            bad.append(str(error))
    _refuse_bad(bad, len(rows) + len(bad), max_bad)
    return rows, bad


def _refuse_bad(bad: Sequence[str], count: int, max_bad: float) -> str:
    """The bad ones of `count` rows in one line; none: "". Raises ValueError if they are more than `max_bad` of them."""
    more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    described = f"{len(bad)} of {count} rows cannot be trained on: {'; '.join(bad[:SHOWN])}{more}"
    if len(bad) > max_bad * count:
        raise ValueError(f"{described}; that is more than --max-bad {max_bad:g}")
    return described if bad else ""


def make_examples(row: Conversation, renderer: Renderer, use_text: bool = False) -> list[Example]:
    """The examples of a conversation: one, or one a turn if later prompts do not go on with earlier text.

    None for answers whose loss flags leave nothing to train. Raises ValueError if an answer cannot be found, and if all
    of them are empty.
    """
    written = _list_written(row, use_text)
    if written:
        finished = row.fields.get("finished", True)
        if not isinstance(finished, bool):
            raise ValueError(f'{row.place}: "finished" is true or false, not {json.dumps(finished):.40}')
        texts = renderer.encode_answers(row, finished)
    else:
        texts = _check_tokens(row.fields[TOKENS], row.place)
    answers = [row.messages[turn] for turn in list_answers(row.messages)]
    flagged = [all(answer.get(flag) in (None, 1) for flag in FLAGS) for answer in answers]
    wanted = [flag and not (written and is_blank(answer)) for flag, answer in zip(flagged, answers, strict=True)]
    if any(flagged) and not any(wanted):
        raise ValueError(f"{row.place}: the answer is empty")
    count = sum(len(text) // 2 for text in texts)
    if count > len(answers):
        raise ValueError(f"{row.place}: there are token ids of {count} answers, but {len(answers)} in the text")
    trained = iter(wanted[-count:])  # the model wrote the last ones; others may be part of its prompt
    examples = []
    for text in texts:
        tokens: list[int] = []
        spans = []
        for prompt, answer in zip(text[::2], text[1::2], strict=True):
            tokens += prompt
            begin = max(len(tokens), 1)  # no position predicts the very first token
            tokens += answer
            if next(trained) and begin < len(tokens):
                spans.append((begin, len(tokens)))
        if spans:
            examples.append(Example(tuple(tokens[: spans[-1][1]]), tuple(spans)))
    return examples


def _list_written(row: Conversation, use_text: bool) -> list[Message]:
    """The answers that are read from text; none of a row with token ids, whose empty answers the model wrote."""
    if TOKENS in row.fields and not use_text:
        return []
    return [row.messages[turn] for turn in list_answers(row.messages)]


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


def choose_draft_vocabulary(examples: Sequence[Example], vocab_size: int, size: int | None) -> Tensor:
    """The tokens that a new head drafts, ascending: the `size` most frequent in answers, as in EAGLE-3. Ties go to the
    lower ids.

    None: all tokens, or of a large vocabulary those that cover 98 % of the answers' tokens, at most 32k. Small data
    names few tokens, and other texts need more, so there are at least 8k.
    """
    counts = Counter(token for one in examples for begin, end in one.spans for token in one.tokens[begin:end])
    if size is None and vocab_size > LARGE_VOCABULARY:
        enough = COVERAGE * counts.total()
        covered = accumulate((count for _, count in counts.most_common()), initial=0)
        size = min(max(sum(before < enough for before in covered), SMALLEST_DRAFT), LARGEST_DRAFT)
    chosen = sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:size]
    return torch.tensor(sorted(chosen))


def find_rarest(examples: Sequence[Example], vocab_size: int) -> int:
    """The token that is least frequent in the examples; of several, the highest id."""
    counts = Counter(token for one in examples for token in one.tokens)
    return min(reversed(range(vocab_size)), key=lambda token: counts[token])


def _split(
    found: Sequence[tuple[bytes, list[Example]]],
    files: Sequence[Path],
    renderer: Renderer,
    max_length: int,
    prompts: int,
) -> Dataset:
    """Hold prompts out, leave out loops, and cut what is too long. found: the examples of each row by its prompt."""
    digests = {digest for digest, _ in found}  # a prompt is held out or not, whatever other data there is
    chosen = {digest for digest in digests if int.from_bytes(digest[:4]) % VALIDATION_SHARE == 0}
    short = {digest for digest, made in found if made[0].spans[0][0] < max_length}
    if short and not chosen & short and len(digests) >= MIN_PROMPTS:
        chosen.add(min(short))
    held_out = {digest: list(made[0].tokens[: made[0].spans[0][0]]) for digest, made in found if digest in chosen}
    examples, dropped, too_long = [], 0, 0
    for example in (example for digest, made in found if digest not in chosen for example in made):
        spans = [span for span in example.spans if not _ends_in_loop(example.tokens[slice(*span)], renderer)]
        dropped += len(example.spans) - len(spans)
        if spans and spans[0][0] >= max_length:
            too_long += 1
        elif spans:
            cut = ((begin, min(end, max_length)) for begin, end in spans if begin < max_length)
            examples.append(Example(example.tokens[: min(spans[-1][1], max_length)], tuple(cut)))
    if not examples:
        raise ValueError(
            f"{', '.join(map(str, files))}: nothing is left to train on ({dropped} answers were loops, {too_long} "
            f"prompts were longer than {max_length} tokens, {len(held_out)} prompts are held out for validation)"
        )
    kept = [tokens for _, tokens in sorted(held_out.items()) if len(tokens) < max_length]
    return Dataset(examples, kept[:prompts], dropped, too_long, len(held_out))


def _ends_in_loop(answer: Sequence[int], renderer: Renderer) -> bool:
    """Whether an answer ends in a loop. Blanks and an end token may follow the loop."""
    return any(has_looped(answer[:end]) for end in range(renderer.count_visible(answer), len(answer) + 1))


def _check_tokens(texts: Any, place: str) -> Texts:
    """The token ids of a row. Raises ValueError unless they are prompts and answers in turn."""
    valid = isinstance(texts, list) and all(
        isinstance(text, list)
        and len(text) > 0
        and len(text) % 2 == 0
        and all(isinstance(part, list) and all(type(token) is int and token >= 0 for token in part) for part in text)
        and all(text[1::2])
        for text in texts
    )
    if not valid or not texts:
        raise ValueError(f'{place}: "{TOKENS}" is a list of texts, each [prompt, answer, prompt, answer, ...] as ids')
    return texts


def _hash_prompt(row: Conversation) -> bytes:
    """A hash of everything before the first answer."""
    asked = row.messages[: list_answers(row.messages)[0]]
    return hashlib.sha256("\n".join(message["content"] for message in asked).encode()).digest()
