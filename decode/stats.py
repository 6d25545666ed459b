"""Counts and times of decoding, the same for every proposer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from time import perf_counter

PARTS = ("proposer", "target", "accept", "rest")


@dataclass
class Seconds:
    """Wall time by part. On a GPU, `accept` includes the wait for the target, because it synchronizes."""

    proposer: float = 0.0
    target: float = 0.0
    accept: float = 0.0
    rest: float = 0.0

    started: float = 0.0  # on the clock of `perf_counter`

    @classmethod
    def begin(cls) -> Seconds:
        """Start the clock of a step."""
        return cls(started=perf_counter())

    def resume(self) -> None:
        """Start the clock again after a break."""
        self.started = perf_counter() - self.total

    def finish(self) -> None:
        """Stop the clock: time that was not measured as another part is `rest`."""
        self.rest = perf_counter() - self.started - self.proposer - self.target - self.accept

    @property
    def total(self) -> float:
        return self.proposer + self.target + self.accept + self.rest

    def add(self, other: Seconds) -> None:
        for part in PARTS:
            setattr(self, part, getattr(self, part) + getattr(other, part))

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time spent inside to one part."""
        started = perf_counter()
        yield
        setattr(self, part, getattr(self, part) + perf_counter() - started)


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
        self.seconds.add(other.seconds)
