"""Requests, their answers and the chunks they arrive in, and where an answer ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transformers import StoppingCriteria, StoppingCriteriaList

from decode.requests.numbers import read_count
from decode.stats import Stats

NEW_TOKENS = 256  # of an answer at most, by default
NO_NUMBERS = (
    "no token can be chosen: the model's logits, or a logits processor's scores, are NaN or infinite, or a processor "
    "forbids every token; check weights and processors, and try float32 or bfloat16 if the model runs in float16"
)


@dataclass(frozen=True)
class Limits:
    """Where answers end: after `max_new_tokens`, at a stop token or stop string, or by `criterion`.

    `criterion(request_id, tokens)` is called after every new token with all tokens, prompt included.
    """

    max_new_tokens: int = NEW_TOKENS
    stop_ids: frozenset[int] = frozenset()
    stop: Sequence[str] = ()
    criterion: Callable[[int, list[int]], bool] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_new_tokens", read_count(self.max_new_tokens, "max_new_tokens"))
        if isinstance(self.stop, str):
            raise ValueError("stop is a list of strings; put a single one into brackets")
        if "" in self.stop:
            raise ValueError("a stop string is empty; it needs at least one character")
        if not (self.criterion is None or callable(self.criterion)) or isinstance(
            self.criterion, StoppingCriteria | StoppingCriteriaList
        ):
            name = type(self.criterion).__name__
            raise TypeError(f"criterion is a function of a request id and all tokens, not a {name}")


class LogProbs(NamedTuple):
    """The model's log-probability of a token and of the most likely ones, best first, before all sampling settings."""

    chosen: float
    best: dict[int, float]


@dataclass(frozen=True)
class Chunk:
    """What one step added to one answer.

    finish: why the answer ended: "eos", "stop", "length", "context", "criterion", "cancelled" or "error"; None: it goes
    on.
    """

    request_id: int
    tokens: list[int]
    drafted: int  # how many tokens, the first ones, are accepted draft tokens
    pieces: list[str]  # the text that each token completed; at the end of an answer also the text held back
    finish: str | None
    stats: Stats = field(default_factory=Stats)  # of this step
    log_probs: list[LogProbs] = field(default_factory=list)  # of each token, if asked for
    answer: Answer | None = None  # the whole answer, once it is finished

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(repr=False)
class Answer:
    """A finished answer."""

    prompt: list[int]
    tokens: list[int]  # as transformers' `generate` returns them, stop token included
    text: str
    finish: str  # why it ended, as in `Chunk`
    stats: Stats
    error: str | None = None  # with "error": one line; the tokens are those before it
    exception: Exception | None = None  # the same as it was raised
    log_probs: list[LogProbs] = field(default_factory=list)  # of each token, if asked for

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        size = f"{len(self.prompt)} prompt tokens, {len(self.tokens)} new, tau {self.stats.tau:.2f}"
        return f"Answer({text!r}, finish={self.finish!r}, {size})"
