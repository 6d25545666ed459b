"""Tokens to text, one at a time: as the tokenizer decodes the whole answer, at a level cost, whatever its kind."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import CLIPTokenizer, CTRLTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from decode.requests.detokenizer import BROKEN, FALLBACK, Detokenizer, TextStream, decode
from tests.decode.requests.test_text import TOKENIZER as BYTE_LEVEL

LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}
LETTERS = [*"abcdefghijklmnopqrstuvwxyz"]
TIDIED = [*LETTERS, "the", "word", *".,?!'", "n't", "'s", "'ve", "do", "not", BROKEN]
SPACED = ["▁", "▁▁", *LETTERS, *(f"▁{letter}" for letter in "anv'"), "▁.", *".,?!'", "n't", "投", "é", BROKEN]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def wrap(model: Any, decoder: Any, pre_tokenizer: Any = None, **settings: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    backend.decoder = decoder
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<end>", **settings)


def number(*names: str) -> dict[str, int]:
    return {name: token for token, name in enumerate(dict.fromkeys(["<unk>", *names]))}


def unigram(decoder: Any, tokens: Sequence[str], byte_fallback: bool = False, **settings: Any) -> Any:
    pieces = [(name, -float(place)) for name, place in number(*tokens).items()]
    model = models.Unigram(pieces, 0, byte_fallback)
    return wrap(model, decoder, pre_tokenizers.Metaspace(), **settings)


def word_piece(**settings: Any) -> PreTrainedTokenizerFast:
    names = number(*TIDIED, *(f"##{name}" for name in TIDIED))
    return wrap(models.WordPiece(names, unk_token="<unk>"), decoders.WordPiece(), **settings)


def byte_fallback(bytes_first: bool = False) -> PreTrainedTokenizerFast:
    """Like Llama 2's, as `sentencepiece` in `test_text.py`."""
    names = [*BYTES, *SPACED] if bytes_first else [*SPACED, *BYTES]
    model = models.BPE(number(*names), [], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    return wrap(model, LLAMA, pre_tokenizers.Metaspace())


def end_of_word() -> PreTrainedTokenizerFast:
    names = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "</w>", BROKEN]
    model = models.BPE(number(*names), [], end_of_word_suffix="</w>", unk_token="<unk>")
    return wrap(model, decoders.BPEDecoder())


def clip() -> CLIPTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    return CLIPTokenizer(vocab={name: token for token, name in enumerate(names)}, merges=[])


def ctrl(**settings: Any) -> CTRLTokenizer:
    with TemporaryDirectory() as folder:
        names, merges = Path(folder) / "names.json", Path(folder) / "merges"
        names.write_text(json.dumps(number(*TIDIED, *(f"{name}@@" for name in TIDIED))), encoding="utf-8")
        merges.write_text("#version\n", encoding="utf-8")
        return CTRLTokenizer(str(names), str(merges), **settings)


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": lambda: BYTE_LEVEL,
    "byte fallback": byte_fallback,
    "Unigram": lambda: unigram(decoders.Metaspace(), SPACED),
    "Unigram, byte fallback": lambda: unigram(LLAMA, [*SPACED, *BYTES], True),
    "Unigram, tidied": lambda: unigram(decoders.Metaspace(), SPACED, clean_up_tokenization_spaces=True),
    "WordPiece": word_piece,
    "WordPiece, tidied": lambda: word_piece(clean_up_tokenization_spaces=True),
    "WordLevel, tidied": lambda: wrap(
        models.WordLevel(number(*TIDIED), unk_token="<unk>"), None, clean_up_tokenization_spaces=True
    ),
    "end of word": end_of_word,
    "CTC": lambda: wrap(models.WordLevel(number(*TIDIED, "|", "<pad>"), unk_token="<unk>"), decoders.CTC()),
    "CLIP": clip,
    "CTRL": ctrl,
    "CTRL, tidied": lambda: ctrl(clean_up_tokenization_spaces=True),
}


@cache
def build(kind: str) -> Any:
    return KINDS[kind]()


def stream(tokens: Sequence[int], tokenizer: Any, **settings: Any) -> list[str]:
    """The pieces of each token, and the rest."""
    detokenizer = Detokenizer(tokenizer, **settings)
    return [*map(detokenizer.push, tokens), detokenizer.rest]


def count_cut(data: bytes) -> int:
    """How many bytes at the end are an incomplete character: some more bytes complete it."""
    for size in (3, 2, 1):
        for more in (bytes([byte]) * count for byte in (0x80, 0xBF) for count in (1, 2, 3)):
            whole = data[-size:] + more
            if len(data) >= size and len(text := whole.decode(errors="ignore")) == 1 and text.encode() == whole:
                return size
    return 0


def read(tokens: Sequence[int], tokenizer: Any, special: bool = False) -> str:
    """What is expected: the tokenizer's own text, without an incomplete character at the end.

    Byte tokens that are not UTF-8 are replaced by tokens of U+FFFD. Tokenizers break the characters around them, too.
    """
    names = tokenizer.convert_ids_to_tokens(tokens, skip_special_tokens=not special)
    if "<0x00>" in tokenizer.get_vocab():
        kept, run = list[str](), b""
        for name in [*names, ""]:
            if FALLBACK.fullmatch(name):
                run += bytes([int(name[3:5], 16)])
                continue
            for letter in run[: len(run) - count_cut(run) * (not name)].decode(errors="surrogateescape"):
                raw = letter.encode(errors="surrogateescape")
                kept += [BROKEN] if "\udc80" <= letter <= "\udcff" else [f"<0x{byte:02X}>" for byte in raw]
            kept, run = [*kept, name], b""
        return tokenizer.decode(tokenizer.convert_tokens_to_ids(kept[:-1]))
    text = tokenizer.decode(tokens, skip_special_tokens=not special)
    if tokenizer is BYTE_LEVEL:
        data = b"".join(bytes(LETTER[letter] for letter in name) for name in names)
        return text[: len(text) - (count_cut(data) > 0)]
    return text


def list_tokens(kind: str) -> list[int]:
    """The tokens of answers: all but, for CLIP, those whose bytes are no characters."""
    tokenizer = build(kind)
    return [
        token
        for name, token in sorted(tokenizer.get_vocab().items())
        if kind != "CLIP" or (name.isascii() and name.strip())
    ]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data(), special=st.booleans())
def test_pieces_add_up_to_the_decoded_text(kind: str, data: st.DataObject, special: bool) -> None:
    tokenizer, tokens = build(kind), list_tokens(kind)
    pool = data.draw(st.lists(st.sampled_from(tokens), min_size=1, max_size=8))
    ids = data.draw(st.lists(st.sampled_from(pool if data.draw(st.booleans()) else tokens), max_size=80))
    expected = read(ids, tokenizer, special)
    assert "".join(stream(ids, tokenizer, special=special)) == expected
    assert decode(ids, tokenizer, special) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_long_answers(kind: str) -> None:
    """The last tokens suffice to decode the next one: answers from few tokens, so that all that joins them occurs."""
    tokenizer, tokens, generator = build(kind), list_tokens(kind), random.Random(0)
    for case in range(30):
        pool = generator.choices(tokens, k=generator.choice((1, 3, 8, 300)))
        ids = generator.choices(pool, k=200)
        assert "".join(stream(ids, tokenizer)) == read(ids, tokenizer), (case, tokenizer.convert_ids_to_tokens(ids))


PIECES: dict[str, tuple[str, list[str], list[str]]] = {  # kind, tokens, and the pieces
    "a full stop takes a space": ("WordLevel, tidied", ["word", ".", "the"], ["word", ".", " the", ""]),
    "a space waits": ("Unigram, tidied", ["a", "▁", ".", "▁", "b", "▁"], ["a", "", ".", "", " b", "", " "]),
    "n't": ("Unigram, tidied", ["d", "o", "▁n", "'", "t"], ["d", "o", "", "", "n't", ""]),
    "quotes": ("Unigram, tidied", ["a", "▁'", "▁", "a"], ["a", "", "", "'a", ""]),
    "a cleaning decoder": ("WordPiece", ["do", "n't", "##a", "."], ["do", "n't", "a", ".", ""]),
    "end of word": ("end of word", ["a", "b</w>", "c</w>"], ["a", "b", " c", ""]),
    "CTRL": ("CTRL", ["the@@", "word", "a@@"], ["the", "word", " a", "@@"]),
    "a first space": ("byte fallback", ["▁a", "▁n"], ["a", " n", ""]),
    "a real U+FFFD": ("byte fallback", ["a", BROKEN, "<0xEF>", "<0xBF>", "<0xBD>"], ["a", BROKEN, "", "", BROKEN, ""]),
    "an incomplete character": ("byte fallback", ["a", "<0xF0>", "<0x9F>"], ["a", "", "", ""]),
    "invalid bytes": ("byte fallback", ["<0xFF>", "<0xE6>", "a"], [BROKEN, "", f"{BROKEN}a", ""]),
    "a word after invalid bytes": ("byte fallback", ["<0xFF>", "▁a"], [BROKEN, " a", ""]),
    "characters next to them": ("byte fallback", ["<0xC3>", "<0xA9>", "<0x80>"], ["", "é", BROKEN, ""]),
    "a special token in a character": ("byte fallback", ["<0xC3>", "<end>", "<0xA9>"], ["", "", "é", ""]),
    "no text at first": ("Unigram", ["▁", "<end>", "▁a"], ["", "", " a", ""]),
    "a repeated token": ("CTC", ["a", "a", "<pad>", "a", "|"], ["a", "", "", "a", " ", ""]),
}


@pytest.mark.parametrize("name", PIECES)
def test_what_is_held_back(name: str) -> None:
    kind, names, pieces = PIECES[name]
    assert stream(build(kind).convert_tokens_to_ids(names), build(kind)) == pieces


class Unnamed:
    """A tokenizer as mistral-common's: without `is_fast`, and tokens are named by their text, broken or not."""

    def __init__(self, tokenizer: Any) -> None:
        self.decode, self._tokenizer = tokenizer.decode, tokenizer

    def __call__(self, text: str, **settings: Any) -> Any:
        return self._tokenizer(text, **settings)

    def convert_ids_to_tokens(self, token: int) -> str:
        return str(self.decode([token]))


@pytest.mark.parametrize("stop", [(), ("zzz",)])
@pytest.mark.parametrize("text", ["naive 🧪", "é", "投 x 🧪🧪."])
def test_a_tokenizer_that_names_tokens_by_their_text(text: str, stop: tuple[str, ...]) -> None:
    stream: Any = TextStream(Unnamed(BYTE_LEVEL), stop)  # type: ignore[arg-type]
    pieces = [stream.push(token) for token in BYTE_LEVEL(text)["input_ids"]]
    assert "".join([*pieces, stream.finish()]) == text
    assert decode(BYTE_LEVEL(text)["input_ids"][:-1], Unnamed(BYTE_LEVEL)) == text[:-1]  # type: ignore[arg-type]


def test_bytes_that_become_no_character_are_not_held_back() -> None:
    def spell(data: bytes) -> list[int]:
        letters = {byte: letter for letter, byte in LETTER.items()}
        return BYTE_LEVEL.convert_tokens_to_ids([letters[byte] for byte in data])

    for data, pieces in (
        (b"\xff\x80a", [BROKEN, BROKEN, "a", ""]),
        (b"\xef\xbf\xbd", ["", "", BROKEN, ""]),  # U+FFFD itself
        (b"\xe6\x8a", ["", "", ""]),
        (b"\xe0\x80\xed\xa0", ["", BROKEN * 2, "", BROKEN * 2, ""]),  # neither has a third byte
        (b"\xf0\x9f\xf0\x9f\xa7\xaa", ["", "", BROKEN, "", "", "🧪", ""]),
    ):
        assert stream(spell(data), BYTE_LEVEL) == pieces
    seconds = (0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xE6, 0xFF)
    for first, second in product(range(0x80, 0x100), seconds):
        data = bytes([first, second])
        whole = data.decode(errors="replace")
        assert "".join(stream(spell(data), BYTE_LEVEL)) == whole[: len(whole) - (count_cut(data) > 0)]


class Counted:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.count = tokenizer, 0

    def decode(self, tokens: Sequence[int], **settings: Any) -> str:
        self.count += len(tokens)
        return self.tokenizer.decode(tokens, **settings)

    def __call__(self, text: str, **settings: Any) -> Any:
        return self.tokenizer(text, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


LONG: dict[str, tuple[str, list[str]]] = {  # kind, and tokens that are repeated
    "ASCII": ("byte-level", [*"ThequickbrownfoxĠ"]),
    "random bytes": ("byte-level", random.Random(0).choices([*LETTER], k=3000)),
    "invalid bytes": ("byte-level", [max(LETTER, key=LETTER.__getitem__)]),
    "bytes that wait": ("byte-level", [letter for letter, byte in LETTER.items() if byte in (0xE6, 0xF0)]),
    "spaces": ("Unigram, tidied", ["▁"]),
    "special tokens": ("byte fallback", ["<end>"]),
    "tokens without text": ("CTC", ["<pad>"]),
    "tokens without text in a word": ("CTC", ["a", *["<pad>"] * 50]),
    "spaces that are stripped": ("CLIP", ["Ġ</w>"]),
    "words in two": ("CTRL", ["the@@"]),
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", LONG)
def test_the_cost_of_a_token_is_level(name: str, special: bool) -> None:
    kind, names = LONG[name]
    tokenizer = Counted(build(kind))
    ids = (tokenizer.convert_tokens_to_ids(names) * 3000)[:3000]
    detokenizer = Detokenizer(tokenizer, special)  # type: ignore[arg-type]
    counts = []
    for token in ids:
        before = tokenizer.count
        detokenizer.push(token)
        counts.append(tokenizer.count - before)
    assert max(counts) <= 80
    assert sum(counts) <= 30 * len(ids)
