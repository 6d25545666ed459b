"""Prompts to tokens, and tokens to text: whole answers, or streamed without broken characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from operator import index
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = PreTrainedTokenizerBase
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]

BROKEN = "\ufffd"  # tokenizers decode an incomplete character to this


def as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts; a single prompt becomes a list of one. Token ids may be in a tensor or an array."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral | Mapping))
    return [prompts] if single else prompts  # type: ignore[list-item, return-value]


def encode(prompt: Prompt, tokenizer: Tokenizer | None, chat: bool | None) -> list[int]:
    """The tokens of a prompt, which is text, chat messages or token ids.

    chat: whether to wrap text in the tokenizer's chat template; None does so if there is one. Raises ValueError for an
    empty prompt, another kind of prompt, or text without a tokenizer.
    """
    try:
        if len(prompt) == 0:
            raise ValueError("the prompt is empty; it needs at least one token")
        if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
            return [index(token) for token in prompt]  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"a prompt is text, chat messages or token ids, not {prompt!r}") from None
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
    """The text of an answer, without special tokens and without an incomplete character at the end."""

    def read(end: int) -> str:
        return str(tokenizer.decode(tokens[:end], skip_special_tokens=True))

    text = read(len(tokens))
    if not text.endswith(BROKEN):
        return text
    # With byte fallback, an incomplete character also breaks the complete ones before it.
    return max((read(end).rstrip(BROKEN) for end in range(len(tokens), max(len(tokens) - 4, -1), -1)), key=len)


def find_special(stop: Sequence[str], tokenizer: Tokenizer | None) -> tuple[frozenset[int], Sequence[str]]:
    """The token ids of stop strings that are special tokens, which no text contains, and the other stop strings."""
    if isinstance(stop, str) or not stop:
        return frozenset(), stop
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {str(token): token_id for token_id, token in added.items() if token.special}
    return frozenset(special[text] for text in stop if text in special), [text for text in stop if text not in special]


class TextStream:
    """Decodes an answer token by token. Holds back incomplete characters and beginnings of stop strings."""

    # tokenizers' DecodeStream also holds back, or at the end drops, complete characters before an incomplete one.

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.stopped = False
        self._ids: list[int] = []
        self._start = 0  # decoding starts at this token: a token's text depends on a few before it
        self._next_start = 0  # and at this one after the next complete character
        self._released = 0  # characters after `_start` that were returned already
        self._held = ""  # text that may begin a stop string

    def push(self, token: int) -> str:
        """The text that this token completes, or "". Sets `stopped` when a stop string is complete."""
        self._ids.append(token)
        text = self._decode(self._start)
        complete = text.rstrip(BROKEN)
        if len(complete) <= self._released:
            return ""
        piece, self._released = complete[self._released :], len(complete)
        if complete == text:
            self._start, self._next_start = self._next_start, len(self._ids)
            self._released = len(self._decode(self._start))
        return self._release(piece)

    def finish(self) -> str:
        """The text that was held back. An incomplete character at the end is dropped."""
        return "" if self.stopped else self._held

    def _decode(self, start: int) -> str:
        return str(self.tokenizer.decode(self._ids[start:], skip_special_tokens=True))

    def _release(self, piece: str) -> str:
        text = self._held + piece
        found = [(begin + len(stop), begin) for stop in self.stop if (begin := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)[1]]  # the stop string that ends first
        held = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
