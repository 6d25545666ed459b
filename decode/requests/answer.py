"""Answers, the chunks they arrive in, where they end, and the counts and times of making them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from time import perf_counter
from typing import NamedTuple

from transformers import StoppingCriteria, StoppingCriteriaList

from decode.requests.numbers import read_count

PARTS = ("proposer", "target", "accept", "rest")  # of the seconds of a step
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
    """Log-probabilities of the model at one place, before all sampling settings (but `Request.log_probs_at`).

    chosen: that of the token in the answer. best: those of the most likely tokens by id, best first.
    """

    chosen: float
    best: dict[int, float]


@dataclass
class Seconds:
    """Wall time by part. On a GPU, `accept` includes the wait for the target, because it synchronizes."""

    proposer: float = 0.0
    target: float = 0.0
    accept: float = 0.0
    rest: float = 0.0
    # When the part that runs has begun, by the clock that `lap` reads, also where a test has replaced it.
    started: float = field(default_factory=lambda: perf_counter(), repr=False, compare=False)

    def lap(self, part: str) -> None:
        """Add the time since the last lap, or since the beginning, to one part."""
        now = perf_counter()
        setattr(self, part, getattr(self, part) + now - self.started)
        self.started = now

    @property
    def total(self) -> float:
        return self.proposer + self.target + self.accept + self.rest


@dataclass
class Stats:
    """Counts of a step, of an answer, or of several added up.

    steps: target forward passes, the prefill included. tokens: new ones. nodes: draft tokens that were verified.
    accepted_by_depth: entry d counts the steps that accepted a draft token at depth d + 1.
    seconds: of the whole batch while this answer was in it, by part.
    reused: tokens of the prompt that were computed for another request.
    """

    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    reused: int = 0

    @property
    def tau(self) -> float:
        """Tau, the mean acceptance length: tokens per target forward pass, bonus token included."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds.total if self.seconds.total else 0.0

    def add(self, other: Stats) -> None:
        """Add the counts of another step or answer."""
        self.steps += other.steps
        self.tokens += other.tokens
        self.nodes += other.nodes
        self.reused += other.reused
        pairs = zip_longest(self.accepted_by_depth, other.accepted_by_depth, fillvalue=0)
        self.accepted_by_depth = [ours + theirs for ours, theirs in pairs]
        for part in PARTS:
            setattr(self.seconds, part, getattr(self.seconds, part) + getattr(other.seconds, part))


@dataclass(frozen=True)
class Chunk:
    """What one step added to one answer.

    request_id: whose answer. tokens: the new token ids. drafted: how many of them, the first ones, are accepted draft
    tokens.
    sources: of each token, the name of what drafted it; "" for the model's own.
    pieces: the text that each token completed; at the end of an answer also the text held back.
    stats: counts and times of this step. log_probs: of each token, if asked for. answer: the whole answer, once it is
    finished.
    finish: why the answer ended: "eos", "stop", "grammar" (it is complete), "length", "context", "criterion",
    "cancelled" or "error"; None: it goes on.
    """

    request_id: int
    tokens: list[int]
    drafted: int
    pieces: list[str]
    finish: str | None
    stats: Stats = field(default_factory=Stats)
    log_probs: list[LogProbs] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
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
