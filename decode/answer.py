"""One answer in the making: what is new, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decode.stats import Stats
from decode.text import TextStream, Tokenizer, decode


@dataclass(frozen=True)
class Limits:
    """Where answers end: after `max_new_tokens`, an end token, a stop string, or where `criterion` says so.

    `criterion(request_id, tokens)` is asked after every new token with all of the row's tokens, prompt included.
    """

    max_new_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    stop: Sequence[str] = ()
    criterion: Callable[[int, list[int]], bool] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if isinstance(self.stop, str):
            raise ValueError("stop is a list of texts; put a single one into brackets")
        if "" in self.stop:
            raise ValueError("a stop string is empty; it needs at least one character")


@dataclass(frozen=True)
class Chunk:
    """What one step added to one answer: its tokens, the first `drafted` of them accepted draft tokens, and text.

    `pieces` has the text that each token completed, and a last one with what was held back when the answer ends.
    `finish` says why it ended: "eos", "stop", "length", "context" or "criterion"; None while it goes on.
    """

    request_id: int
    tokens: list[int]
    drafted: int
    pieces: list[str]
    finish: str | None
    stats: Stats = field(default_factory=Stats)  # of this step
    answer: Answer | None = None  # the whole answer, once it is finished

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(repr=False)
class Answer:
    """A finished answer: ids as transformers' `generate` returns them (end token included), text, why it ended."""

    prompt: list[int]
    tokens: list[int]
    text: str
    finish: str
    stats: Stats

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        size = f"{len(self.prompt)} prompt tokens, {len(self.tokens)} new, tau {self.stats.tau:.2f}"
        return f"Answer({text!r}, finish={self.finish!r}, {size})"


@dataclass
class Request:
    """A prompt and its answer so far."""

    request_id: int
    prompt: list[int]
    limits: Limits
    context: int
    text: TextStream | None = None
    sequence: list[int] = field(init=False)
    stats: Stats = field(default_factory=Stats)
    finish: str | None = None

    def __post_init__(self) -> None:
        self.sequence = list(self.prompt)
        self._pieces: list[str] = []

    @property
    def room(self) -> int:
        """How many more tokens it may get."""
        made = len(self.sequence) - len(self.prompt)
        return min(self.limits.max_new_tokens - made, self.context - len(self.sequence))

    def extend(self, drafted: Sequence[int], bonus: int) -> Chunk:
        """Add accepted draft tokens and the bonus token, up to the first that ends the answer and nothing beyond it."""
        tokens: list[int] = []
        pieces: list[str] = []
        for token in (*drafted, bonus):
            self.sequence.append(token)
            tokens.append(token)
            if self.text is not None:
                pieces.append(self.text.push(token))
            self.finish = self._end(token)
            if self.finish:
                if self.text is not None:
                    pieces.append(self.text.finish())
                break
        self._pieces += pieces
        return Chunk(self.request_id, tokens, min(len(drafted), len(tokens)), pieces, self.finish)

    def answer(self, tokenizer: Tokenizer | None) -> Answer:
        """The finished answer."""
        tokens = self.sequence[len(self.prompt) :]
        text = "".join(self._pieces)
        if self.text is None and tokenizer is not None:
            text = decode(tokens, tokenizer)
        return Answer(self.prompt, tokens, text, self.finish or "", self.stats)

    def _end(self, token: int) -> str | None:
        if token in self.limits.stop_ids:
            return "eos"
        if self.text is not None and self.text.stopped:
            return "stop"
        if self.limits.criterion is not None and self.limits.criterion(self.request_id, self.sequence):
            return "criterion"
        if len(self.sequence) - len(self.prompt) >= self.limits.max_new_tokens:
            return "length"
        return "context" if self.room <= 0 else None
