"""An answer's tokens as text: whole, or token by token up to a stop string; text that was returned never changes."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from decode.requests.numbers import describe
from decode.requests.text import Tokenizer, find_special_tokens

BROKEN = "\ufffd"  # bytes that are no character decode to this; it is also a character of its own
INCOMPLETE = re.compile(  # the first bytes of a character in UTF-8
    rb"([\xc2-\xf4]|\xe0[\xa0-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]|\xed[\x80-\x9f]"
    rb"|\xf0[\x90-\xbf][\x80-\xbf]?|[\xf1-\xf3][\x80-\xbf]{1,2}|\xf4[\x80-\x8f][\x80-\xbf]?)\Z"
)
UNTIDY = re.compile(r"( [ n'vr]{0,3}|')?(@@)?\Z")  # a tokenizer that tidies spaces may join it with later text
SUBWORD = re.compile(r"@@\Z")  # vanishes when the word goes on, with tokenizers such as CTRL's
FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # a token of one byte in a SentencePiece vocabulary
BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}  # the letters of byte-level vocabularies
LONGEST, KEPT = 16, 8  # a window that is longer than the one is shortened to the other


def decode(tokens: Sequence[int], tokenizer: Tokenizer, special: bool = False) -> str:
    """The text of an answer, without an incomplete character at its end; special: with its special tokens.

    The tokenizer's own text but for that, and for runs of byte tokens that are not UTF-8: see `Detokenizer`.
    """
    text = str(tokenizer.decode(tokens, skip_special_tokens=not special))
    if BROKEN not in text:
        return text
    detokenizer = Detokenizer(tokenizer, special)
    return "".join([*map(detokenizer.push, tokens), detokenizer.rest])


class Detokenizer:
    """Decodes an answer token by token. What is returned is what the tokenizer makes of the whole answer.

    Held back is only what later tokens may change: at most three bytes of an incomplete character, and with tokenizers
    that tidy spaces or join subwords (CTRL's `@@`) at most six characters. Bytes that can become no character come as
    U+FFFD at once. In a run of byte tokens (SentencePiece's byte fallback) only those are U+FFFD, while tokenizers then
    break the whole run.

    special: with the text of special tokens. continues: as in the middle of a text, where a word may begin with a space
    that tokenizers drop at the beginning. `rest` is the complete text that is held back.
    """

    # A window of the last tokens is decoded each time, after a letter in place of the text before them: tokenizers
    # decode the first token in another way.

    def __init__(self, tokenizer: Tokenizer, special: bool = False, continues: bool = False) -> None:
        self.rest = ""
        self._tokenizer = tokenizer
        self._special = special
        self._skipped: dict[int, bool] = {}
        is_fast = getattr(tokenizer, "is_fast", None)
        self._has_names = is_fast is not None  # mistral-common's have none: there, U+FFFD names parts of characters
        self._unsettled = UNTIDY if self._tidies() else SUBWORD if is_fast is False else None
        letter = [*tokenizer("a", add_special_tokens=False)["input_ids"]]
        self._anchor = letter if self._decode(letter).strip() else []
        self._waiting = b""  # byte tokens at the window's end that may become a character
        self._window = [*self._anchor] if continues else []
        self._returned = len(self._decode(self._window))  # characters of the window's text that were returned

    def push(self, token: int) -> str:
        """The text that is certain now, or ""."""
        if not self._special and self.skips(token):
            return ""
        byte = self._find_byte(token) or b""
        piece = ""
        if self._waiting and not (byte and _may_be_character(self._waiting + byte)):
            piece = self._give_up()
        self._window.append(token)
        self._waiting += byte
        if not _may_be_character(self._waiting):
            return piece + self._give_up()
        if not _is_incomplete(self._waiting):
            self._waiting = b""
        return piece + self._advance()

    def skips(self, token: int) -> bool:
        """Whether it is a special token, which the text of an answer does not have."""
        if token not in self._skipped:
            texts = (self._tokenizer.decode([token], skip_special_tokens=skip) for skip in (True, False))
            self._skipped[token] = not next(texts) and bool(next(texts))
        return self._skipped[token]

    def _tidies(self) -> bool:
        """Whether spaces are tidied; with a byte-level vocabulary the setting has no effect."""
        if not getattr(self._tokenizer, "clean_up_tokenization_spaces", False):
            return False
        return "a ." not in self._decode(self._tokenizer("a .", add_special_tokens=False)["input_ids"])

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=not self._special))

    def _advance(self) -> str:
        """Decode the window, and return what is certain and new."""
        text = self._decode(self._window[: len(self._window) - len(self._waiting)])
        complete = text[:-1] if text.endswith(BROKEN) and self._ends_incomplete() else text
        unsettled = self._unsettled.search(complete) if self._unsettled and complete is text else None
        certain = unsettled.start() if unsettled else len(complete)
        piece = complete[self._returned : certain]
        self._returned = max(self._returned, certain)
        self.rest = complete[self._returned :]
        if len(self._window) > LONGEST and not self._waiting:
            self._shorten()
        return piece

    def _give_up(self) -> str:
        """The rest and one U+FFFD for each waiting byte. The bytes leave the window: they would break others."""
        size = len(self._waiting)
        text = self._decode(self._window[:-size])[self._returned :] + BROKEN * size
        self.rest, self._waiting, self._window = "", b"", [*self._anchor]
        self._returned = len(self._decode(self._window))
        return text

    def _shorten(self) -> None:
        """Drop the window's first tokens, if the text of the others is the same without them."""
        begin = self._anchor if self._returned else self._window[:1]
        start = len(self._decode(begin))
        # With a letter after them: some tokenizers drop spaces at the end.
        before = self._decode([*self._window, *self._anchor])
        new = len(before) - self._returned
        for size in range(KEPT, KEPT - 4, -1):  # not from within a character on
            kept = [*begin, *self._window[-size:]]
            after = self._decode([*kept, *self._anchor])
            text = after[start:].removeprefix(" ")
            if before.endswith(text) and len(text) >= new:
                self._window, self._returned = kept, len(after) - new
                break

    def _ends_incomplete(self) -> bool:
        """Whether a U+FFFD at the end of the window's text is an incomplete character."""
        *others, last = (self._find_bytes(token) for token in self._window[-4:])
        if last is None:  # it cannot be known; most such characters are incomplete
            return True
        return _is_incomplete(b"".join([*(each or b" " for each in others), last]))

    def _find_bytes(self, token: int) -> bytes | None:
        """The bytes of a token; None if they are not known."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        data = self._find_byte(token)
        if data is None and isinstance(name, str):
            is_bytes = all(letter in BYTES for letter in name)
            data = bytes(BYTES[letter] for letter in name) if is_bytes else name.encode()
            if BROKEN in name:
                is_known = self._has_names and self._tokenizer.convert_tokens_to_ids(name) == token
            else:
                is_known = data.decode(errors="replace") == self._decode([token])
            data = data if is_known else None
        return data

    def _find_byte(self, token: int) -> bytes | None:
        """The byte of a byte token."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        found = FALLBACK.fullmatch(name) if isinstance(name, str) else None
        return bytes([int(found[1], 16)]) if found and self._decode([token]) != name else None


def _is_incomplete(data: bytes) -> bool:
    """Whether the data ends within a character."""
    return INCOMPLETE.search(data) is not None


def _may_be_character(data: bytes) -> bool:
    """Whether the data is a character or the beginning of one, or empty."""
    return INCOMPLETE.fullmatch(data) is not None or data.decode(errors="ignore").encode() == data


def read_stop(stop: Any) -> tuple[str, ...]:
    """Stop strings: one, several or none. Raises TypeError for anything else and ValueError for an empty string."""
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence | Set) or not all(isinstance(text, str) for text in strings):
        raise TypeError(f"stop is a string or a list of strings, not {describe(stop)}")
    if "" in strings:
        raise ValueError("a stop string is empty; it needs at least one character")
    return tuple(strings)


def find_special(stop: Sequence[str], tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids of stop strings that are special tokens: these end an answer as end tokens do."""
    special = find_special_tokens(tokenizer) if stop else {}
    return frozenset(special[text] for text in stop if text in special)


class TextStream:
    """Decodes an answer token by token, up to a stop string.

    Stop strings are looked for in the text with special tokens, whichever tokens spell them. What is returned is the
    text without special tokens. Held back is what may begin a stop string, and what a `Detokenizer` holds back. A space
    at the beginning of the first word counts, although tokenizers such as Llama 2's leave it out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stop = tuple(stop)
        self.stopped = False
        self._plain = Detokenizer(tokenizer)
        self._held = ""  # text that may begin a stop string
        self._full = Detokenizer(tokenizer, special=True, continues=True) if stop else None
        self._text = ""  # the same with special tokens
        self._is_plain: list[bool] = []  # of each of its characters, whether it is of no special token

    def push(self, token: int) -> str:
        """The text that is certain with this token, or "". Sets `stopped` when a stop string is complete."""
        piece = self._plain.push(token)
        if self._full is None:
            return piece
        before = len(self._full.rest)
        text = self._full.push(token)
        plain = min(before, len(text)) if self._plain.skips(token) else len(text)
        return self._add(piece, text, plain) if text or piece else ""

    def finish(self) -> str:
        """The text that was held back, up to a stop string in it. An incomplete character at the end is dropped."""
        if self.stopped:
            return ""
        piece, self._plain.rest = self._plain.rest, ""
        if self._full is None:
            return piece
        text, self._full.rest = self._full.rest, ""
        piece = self._add(piece, text, len(text))
        held, self._held = self._held, ""
        return piece if self.stopped else piece + held

    def _add(self, piece: str, text: str, plain: int) -> str:
        """Add text without and with special tokens. Returns text.

        The first `plain` characters of `text` belong to no special token.
        """
        assert self._full is not None
        self._held += piece
        self._text += text
        self._is_plain += [True] * plain + [False] * (len(text) - plain)
        found = [(begin + len(stop), begin) for stop in self.stop if (begin := self._text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held += self._plain.rest
            begin, later = min(found)[1], len(self._full.rest)  # the stop string that ends first
            return self._release(sum(self._is_plain[begin:]) + later)
        begin = len(self._text) - max(_overlap(self._text, stop) for stop in self.stop)
        self._text, self._is_plain = self._text[begin:], self._is_plain[begin:]
        return self._release(sum(self._is_plain))

    def _release(self, kept: int) -> str:
        """All held text but the last `kept` characters."""
        size = max(len(self._held) - kept, 0)
        piece, self._held = self._held[:size], self._held[size:]
        return piece


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
