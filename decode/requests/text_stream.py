"""The text of an answer as it grows, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from decode.requests.detokenizer import Detokenizer
from decode.requests.numbers import describe
from decode.requests.text import Tokenizer, find_special_tokens


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
