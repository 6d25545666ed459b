"""What a run cost and what guessing brought, the same for every proposer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from time import perf_counter

PARTS = ("proposer", "target", "accept", "rest")


@dataclass
class Seconds:
    """Wall time by part. On a GPU work is queued: waiting for the target falls into `accept`, which reads it."""

    proposer: float = 0.0
    target: float = 0.0
    accept: float = 0.0
    rest: float = 0.0

    begun: float = 0.0

    @classmethod
    def begin(cls) -> Seconds:
        """Start the clock of a step."""
        return cls(begun=perf_counter())

    def finish(self) -> None:
        """Stop it: what was not measured as another part is `rest`."""
        self.rest = perf_counter() - self.begun - self.proposer - self.target - self.accept

    @property
    def total(self) -> float:
        return self.proposer + self.target + self.accept + self.rest

    def add(self, other: Seconds) -> None:
        for part in PARTS:
            setattr(self, part, getattr(self, part) + getattr(other, part))

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time spent inside to one part."""
        begun = perf_counter()
        yield
        setattr(self, part, getattr(self, part) + perf_counter() - begun)


@dataclass
class Stats:
    """Counts of a step, of an answer, or of several added up.

    A step is one forward pass of the target; the prompt's is one, too.
    `accepted_by_depth[d]`: in how many steps a guess d + 1 tokens ahead was accepted. `seconds`: of the whole batch
    while this answer was in it.
    """

    steps: int = 0
    tokens: int = 0
    nodes: int = 0  # guessed tokens that the target looked at
    accepted_by_depth: list[int] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)

    @property
    def tau(self) -> float:
        """New tokens per forward pass of the target; 1 for plain decoding."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds.total if self.seconds.total else 0.0

    @classmethod
    def of_step(cls, tokens: int, accepted: int, nodes: int, seconds: Seconds) -> Stats:
        """One step: `tokens` new ones, of which `accepted` were guessed, with `nodes` guesses looked at."""
        return cls(1, tokens, nodes, [1] * accepted, seconds)

    def add(self, other: Stats) -> None:
        """Add the counts of another step or answer."""
        self.steps += other.steps
        self.tokens += other.tokens
        self.nodes += other.nodes
        pairs = zip_longest(self.accepted_by_depth, other.accepted_by_depth, fillvalue=0)
        self.accepted_by_depth = [ours + theirs for ours, theirs in pairs]
        self.seconds.add(other.seconds)
