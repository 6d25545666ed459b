"""Several answers in the making, shown one after the other."""

from __future__ import annotations

import sys
from typing import TextIO


class Lanes:
    """Lets several answers grow at once and writes them in order: the first as it grows, the others after it."""

    def __init__(self, count: int) -> None:
        self._waiting: list[list[tuple[TextIO, str]]] = [[] for _ in range(count)]
        self._done = [False] * count
        self._shown = 0  # the lane that is live

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        """When work stops early, what ended is still written."""
        for lane, done in enumerate(self._done):
            if done:
                self._write(lane)

    def put(self, lane: int, text: str, file: TextIO | None = None) -> None:
        """Add to a lane, for standard output or another file; written once the lane is live."""
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
