"""How answers are shown on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from decode import Answer, Chunk

RAMP = (114, 78, 79, 80, 81, 75, 69, 105, 141, 177, 176, 212)  # of the 256 colours: green over blue to pink


def wants_colour() -> bool:
    """Whether standard output is a terminal that may be painted (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(chunk: Chunk) -> str:
    """A chunk's text with what was guessed and accepted in colour, by how many tokens ahead it was guessed."""
    guessed = zip(RAMP + RAMP[-1:] * chunk.guessed, chunk.pieces[: chunk.guessed], strict=False)
    painted = [f"\033[38;5;{colour}m{piece}\033[0m" if piece else "" for colour, piece in guessed]
    return "".join(painted + chunk.pieces[chunk.guessed :])


def describe(answer: Answer) -> str:
    """What an answer cost and what guessing brought, in one line."""
    stats = answer.stats
    depths = " ".join(map(str, stats.accepted_by_depth)) or "none"
    return (
        f"{len(answer.prompt)} prompt tokens, {stats.tokens} tokens in {stats.steps} steps (tau {stats.tau:.2f}), "
        f"{stats.seconds.total:.2f} s, {stats.tokens_per_second:.1f} tokens/s, accepted by depth: {depths}"
    )


class Lanes:
    """Lets several answers grow at once and shows them one after the other: the first live, the others in its wake."""

    def __init__(self, count: int) -> None:
        self._waiting: list[list[tuple[TextIO, str]]] = [[] for _ in range(count)]
        self._done = [False] * count
        self._shown = 0  # the lane that is live

    @classmethod
    @contextmanager
    def opened(cls, count: int) -> Iterator[Lanes]:
        """Lanes for as long as the work goes on; when it stops early, what ended is still written."""
        lanes = cls(count)
        try:
            yield lanes
        finally:
            for lane in range(count):
                if lanes._done[lane]:
                    lanes._write(lane)

    def put(self, lane: int, text: str, file: TextIO | None = None) -> None:
        """Add to a lane, for standard output or another file; written now if the lane is live, or when it becomes so."""
        self._waiting[lane].append((file or sys.stdout, text))
        if lane == self._shown:
            self._write(lane)

    def end(self, lane: int) -> None:
        """Nothing more comes in this lane."""
        self._done[lane] = True
        while self._shown < len(self._done) and self._done[self._shown]:
            self._write(self._shown)
            self._shown += 1
        if self._shown < len(self._done):
            self._write(self._shown)

    def _write(self, lane: int) -> None:
        for file, text in self._waiting[lane]:
            file.write(text)
            file.flush()
        self._waiting[lane].clear()
