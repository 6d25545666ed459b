"""Text streamed without broken characters, and where an answer ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decode.request import Request
from decode.requests.answer import Chunk, Limits
from decode.requests.detokenizer import BROKEN, TextStream
from tests.support.tokenizers import sentence_piece

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)


def build_tokenizer(merges: Sequence[tuple[str, str]] = (), template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE: 256 bytes, then the merges, then two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<pad>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    tokenizer.chat_template = template
    return tokenizer


def as_letters(text: str) -> str:
    """A text as byte-level vocabularies spell it, one letter per byte."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in level.pre_tokenize_str(text))


def merge_of(text: str, start: int, end: int) -> list[tuple[str, str]]:
    """The merges that turn some bytes of a text into one token. It may begin and end inside a character."""
    letters = as_letters(text)[start:end]
    return [(letters[:size], letters[size]) for size in range(1, len(letters))]


# Tokens of half a character, of one and a half characters, and of several characters.
MERGES = [
    *merge_of("🧪🧪", 1, 6),
    *merge_of("投機", 0, 4),
    *merge_of("A投", 0, 3),
    *merge_of("Привет", 0, 7),
    *merge_of("abab", 0, 3),
    *merge_of("End.", 0, 4),
]


TOKENIZER = build_tokenizer(list(dict.fromkeys(MERGES)))
END = TOKENIZER.eos_token_id


def stream(ids: Sequence[int], stop: Sequence[str] = (), tokenizer: Any = TOKENIZER) -> list[str]:
    """The streamed pieces: one per token, and a last one from `finish`."""
    text = TextStream(tokenizer, stop)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            break
    return [*pieces, text.finish()]


def spell(text: str) -> list[int]:
    """A text in tokens of one byte."""
    return TOKENIZER.convert_tokens_to_ids(list(as_letters(text)))


def tokenize(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


# The text "A投" in two tokens. The first has a letter and half a character.
INSIDE = TOKENIZER.convert_tokens_to_ids([as_letters("A投")[:3], as_letters("A投")[3]])


# Text streams


def test_a_character_comes_with_its_last_byte() -> None:
    assert stream(spell("a🧪é")) == ["a", "", "", "", "🧪", "", "é", ""]
    assert stream(INSIDE) == ["A", "投", ""]  # "A" is not held back


# Stop strings


def test_a_stop_string_ends_the_answer_with_its_last_token() -> None:
    """Even if that token also has half of the next character."""
    assert stream([*spell("a"), *INSIDE], ["aA"]) == ["", "", ""]


def test_only_possible_stop_strings_are_held_back() -> None:
    assert stream(spell("aabaXab"), ["abab"]) == ["", "a", "", "", "abaX", "", "", "ab"]


def test_stop_strings_in_random_text() -> None:
    generator = random.Random(1)
    stopped = 0
    for _ in range(200):
        text = "".join(generator.choices("ab投é", k=generator.randrange(1, 25)))
        lengths = [generator.randrange(1, 5) for _ in range(generator.randrange(1, 4))]
        stops = ["".join(generator.choices("ab投é", k=length)) for length in lengths]
        # The text before the stop string that ends first; of those that end together, the longest.
        ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
        starts = [ends[0] - len(stop) for stop in stops if text[: ends[0]].endswith(stop)] if ends else [len(text)]
        for ids in (spell(text), tokenize(text)):
            assert "".join(stream(ids, stops)) == text[: min(starts)], (text, stops)
        stopped += bool(ends)
    assert 50 < stopped < 190


# Requests


def make_request(tokenizer: Any = TOKENIZER, context: int = 1000, **limits: Any) -> Request:
    limits = Limits(**limits)
    return Request(0, [7, 8], limits, context, None if tokenizer is None else TextStream(tokenizer, limits.stop))


def extend(request: Request, ids: Sequence[int], width: int) -> list[Chunk]:
    """Add tokens `width` at a time; all but the last of them are draft tokens."""
    chunks = []
    for start in range(0, len(ids), width):
        *drafted, bonus = ids[start : start + width]
        chunks.append(request.extend(drafted, bonus))
        if request.finish:
            break
    return chunks


ENDS: dict[str, tuple[dict[str, Any], str, str, int]] = {  # limits; finish, text, number of tokens
    "end token": ({"stop_ids": frozenset([END])}, "eos", "ab STOP c", 10),
    "stop string": ({"stop": ["STOP"]}, "stop", "ab ", 7),
    "length": ({"max_new_tokens": 6}, "length", "ab STO", 6),
    "length and a stop string": ({"max_new_tokens": 7, "stop": ["STOP"]}, "stop", "ab ", 7),
    "context": ({"context": 7}, "context", "ab ST", 5),
    "criterion": ({"criterion": lambda request_id, tokens: len(tokens) == 6}, "criterion", "ab S", 4),
}


@pytest.mark.parametrize("width", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("name", ENDS)
def test_nothing_comes_after_the_end(name: str, width: int) -> None:
    limits, finish, expected, count = ENDS[name]
    ids = [*spell("ab STOP c"), END, *spell(" and far beyond it")]
    request = make_request(**limits)
    chunks = extend(request, ids, width)
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [finish]
    assert [token for chunk in chunks for token in chunk.tokens] == ids[:count] == request.sequence[2:]
    assert "".join(chunk.text for chunk in chunks) == expected
    answer = request.deliver(chunks[-1], TOKENIZER).answer
    assert answer is not None
    assert (answer.prompt, answer.tokens, answer.text, answer.finish) == ([7, 8], ids[:count], expected, finish)
    for chunk in chunks:
        assert len(chunk.pieces) == len(chunk.tokens) + (chunk.finish is not None)
        assert chunk.drafted == min(len(chunk.tokens), width - 1)


def test_a_criterion_is_called_after_every_token_up_to_the_end() -> None:
    seen: list[list[int]] = []

    def criterion(request_id: int, tokens: list[int]) -> bool:
        seen.append(list(tokens))
        return tokens[-1] == 30

    request = make_request(None, criterion=criterion)
    request.extend([10, 20], 25)
    assert request.finish is None and request.room == 253
    request.extend([26, 30, 31], 32)
    assert request.finish == "criterion"
    assert seen == [[7, 8, 10, 20, 25, 26, 30][:size] for size in range(3, 8)]


@pytest.mark.parametrize("cut", range(6))
def test_text_is_the_same_without_streaming(cut: int) -> None:
    byte_fallback = sentence_piece()
    raw = [f"<0x{byte:02X}>" for byte in "🧪🧪".encode()]
    for tokenizer, ids in (
        (TOKENIZER, [*spell("é 🧪"), END]),
        (TOKENIZER, [*spell("é "), *INSIDE]),
        (byte_fallback, byte_fallback.convert_tokens_to_ids(["a", *raw])),
    ):
        ids = ids[: len(ids) - cut]
        with_stream, without = (make_request(kind, max_new_tokens=max(len(ids), 1)) for kind in (tokenizer, None))
        for request in (with_stream, without):
            extend(request, ids, 3)
        assert with_stream._make_answer(tokenizer).text == without._make_answer(tokenizer).text
        assert BROKEN not in without._make_answer(tokenizer).text
        assert without._make_answer(None).text == ""
