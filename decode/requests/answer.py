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
    """Where answers end.

    max_new_tokens: after so many tokens. stop_ids: at one of these tokens, which stays. stop: before one of these
    strings.
    criterion: where `criterion(request_id, tokens)` is true. It is called after every new token with all tokens, prompt
    included.
    """

    max_new_tokens: int = NEW_TOKENS
    stop_ids: frozenset[int] = frozenset()
    stop: Sequence[str] = ()
    criterion: Callable[[int, list[int]], bool] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_new_tokens", read_count(self.max_new_tokens, "max_new_tokens"))
        if not (self.criterion is None or callable(self.criterion)) or isinstance(
            self.criterion, StoppingCriteria | StoppingCriteriaList
        ):
            name = type(self.criterion).__name__
            raise TypeError(f"criterion is a function of a request id and all tokens, not a {name}")


class LogProbs(NamedTuple):
    """Log-probabilities of the model at one place, before all sampling settings.

    chosen: that of the token in the answer. best: those of the most likely tokens by id, best first.
    """

    chosen: float
    best: dict[int, float]


@dataclass(frozen=True)
class Chunk:
    """What one step added to one answer.

    request_id: whose answer. tokens: the new token ids. drafted: how many of them, the first ones, are accepted draft
    tokens.
    pieces: the text that each token completed; at the end of an answer also the text held back.
    stats: counts and times of this step. log_probs: of each token, if asked for. answer: the whole answer, once it is
    finished.
    finish: why the answer ended: "eos", "stop", "length", "context", "criterion", "cancelled" or "error"; None: it goes
    on.
    """

    request_id: int
    tokens: list[int]
    drafted: int
    pieces: list[str]
    finish: str | None
    stats: Stats = field(default_factory=Stats)
    log_probs: list[LogProbs] = field(default_factory=list)
    answer: Answer | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(repr=False)
class Answer:
    """A finished answer.

    prompt: its token ids. tokens: the new ones, as transformers' `generate` returns them, stop token included.
    text: of the new tokens, without special ones, up to a stop string and without half a character. finish: why it
    ended, as in `Chunk`.
    stats: counts and times of the whole answer. log_probs: of each token, if asked for.
    error: where `finish` is "error", what went wrong in one line; the tokens are those before it. exception: the same
    as it was raised.
    """

    prompt: list[int]
    tokens: list[int]
    text: str
    finish: str
    stats: Stats
    error: str | None = None
    exception: Exception | None = None
    log_probs: list[LogProbs] = field(default_factory=list)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        size = f"{len(self.prompt)} prompt tokens, {len(self.tokens)} new, tau {self.stats.tau:.2f}"
        return f"Answer({text!r}, finish={self.finish!r}, {size})"
