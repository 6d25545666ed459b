"""Between text and tokens: prompts in, and text out a token at a time without broken characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = PreTrainedTokenizerBase
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]

BROKEN = "\ufffd"  # what tokenizers decode half a character to


def encode(prompt: Prompt, tokenizer: Tokenizer | None, chat: bool | None) -> list[int]:
    """A prompt's tokens: token ids as they are, text and chat messages through the tokenizer.

    `chat` wraps text in the tokenizer's chat template; None does so where it has one. Raises ValueError for an empty
    prompt, or text without a tokenizer.
    """
    if len(prompt) == 0:
        raise ValueError("the prompt is empty; it needs at least one token")
    if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
        return [int(token) for token in prompt]  # type: ignore[arg-type]
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


class TextStream:
    """Decodes an answer as it grows, holding back half characters and what may become a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.stopped = False
        self._ids: list[int] = []
        self._shown = 0  # ids whose text was given out
        self._context = 0  # decoding starts here: a token's text depends on the few before it
        self._held = ""  # text that may be the beginning of a stop string

    def push(self, token: int) -> str:
        """The text that this token completes; "" where it completes none. `stopped` once a stop string is complete."""
        self._ids.append(token)
        before = self._decode(self._context, self._shown)
        now = self._decode(self._context, len(self._ids))
        if now.endswith(BROKEN) or len(now) <= len(before):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return self._release(now[len(before) :])

    def finish(self) -> str:
        """What was held back and did not become a stop string. Half a character at the end is left out."""
        if self.stopped:
            return ""
        tail = self._decode(self._context, len(self._ids))[len(self._decode(self._context, self._shown)) :]
        return self._held + tail.rstrip(BROKEN)

    def _decode(self, start: int, end: int) -> str:
        return str(self.tokenizer.decode(self._ids[start:end], skip_special_tokens=True))

    def _release(self, piece: str) -> str:
        text = self._held + piece
        found = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
