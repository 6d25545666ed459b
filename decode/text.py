"""Between text and tokens: prompts in, and text out a token at a time without broken characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = PreTrainedTokenizerBase
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]

BROKEN = "\ufffd"  # what tokenizers decode half a character to


def as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts; a single prompt becomes a list of one."""
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping))
    return [prompts] if single else prompts  # type: ignore[list-item, return-value]


def encode(prompt: Prompt, tokenizer: Tokenizer | None, chat: bool | None) -> list[int]:
    """A prompt's tokens: token ids as they are, text and chat messages through the tokenizer.

    `chat` wraps text in the tokenizer's chat template; None does so where it has one. Raises ValueError for an empty
    prompt, one of another kind, or text without a tokenizer.
    """
    if len(prompt) == 0:
        raise ValueError("the prompt is empty; it needs at least one token")
    if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
        try:
            return [index(token) for token in prompt]  # type: ignore[arg-type]
        except TypeError:
            raise ValueError(f"a prompt is text, chat messages or token ids, not a list of {prompt[0]!r}") from None
    if tokenizer is None:
        raise ValueError("this target has no tokenizer; give prompts as token ids, or Target(model, tokenizer)")
    messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not isinstance(prompt, str) or chat:
        if tokenizer.chat_template is None:
            raise ValueError("this tokenizer has no chat template; give plain text and chat=False")
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise ValueError("the prompt has no tokens; it needs at least one")
    return [int(token) for token in ids]


def decode(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of an answer, without special tokens and without half a character at its end."""

    def read(end: int) -> str:
        return str(tokenizer.decode(tokens[:end], skip_special_tokens=True))

    text = read(len(tokens))
    if not text.endswith(BROKEN):
        return text
    # Tokenizers with single bytes as a last resort lose whole characters as well to a byte too many after them.
    return max((read(end).rstrip(BROKEN) for end in range(len(tokens), max(len(tokens) - 4, -1), -1)), key=len)


def find_special(stop: Sequence[str], tokenizer: Tokenizer | None) -> tuple[frozenset[int], Sequence[str]]:
    """The ids of those stop strings that are special tokens, which no text ever shows, and the other strings."""
    if isinstance(stop, str) or not stop:
        return frozenset(), stop
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {str(token): number for number, token in added.items() if token.special}
    return frozenset(special[text] for text in stop if text in special), [text for text in stop if text not in special]


class TextStream:
    """Decodes an answer as it grows, holding back half characters and what may become a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.stopped = False
        self._ids: list[int] = []
        self._context = 0  # decoding starts here: a token's text depends on the few before it
        self._shown = 0  # where it will start from the next whole character on
        self._given = 0  # characters behind `_context` that were given out
        self._held = ""  # text that may be the beginning of a stop string

    def push(self, token: int) -> str:
        """The text that this token completes; "" where it completes none. `stopped` once a stop string is complete."""
        self._ids.append(token)
        text = self._decode(self._context)
        whole = text.rstrip(BROKEN)
        if len(whole) <= self._given:
            return ""
        piece, self._given = whole[self._given :], len(whole)
        if whole == text:
            self._context, self._shown = self._shown, len(self._ids)
            self._given = len(self._decode(self._context))
        return self._release(piece)

    def finish(self) -> str:
        """What was held back and did not become a stop string. Half a character at the end is left out."""
        return "" if self.stopped else self._held

    def _decode(self, start: int) -> str:
        return str(self.tokenizer.decode(self._ids[start:], skip_special_tokens=True))

    def _release(self, piece: str) -> str:
        text = self._held + piece
        found = [(place + len(stop), place) for stop in self.stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)[1]]  # before the one that is complete first
        held = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
