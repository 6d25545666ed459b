"""Answers on a terminal: draft tokens in colour, and several growing answers written in order."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from decode import Chunk

# Colours of xterm's 256 for draft tokens 1, 2, ... tokens ahead: green over blue to pink.
RAMP = (114, 78, 79, 80, 81, 75, 69, 105, 141, 177, 176, 212)


def has_colour(file: TextIO) -> bool:
    """Whether the file is a terminal that shows colours (no-color.org)."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def format_chunk(chunk: Chunk, coloured: bool) -> str:
    """The chunk's text, with terminal colours for accepted draft tokens if `coloured`."""
    if not coloured:
        return chunk.text
    colours = [RAMP[min(place, len(RAMP) - 1)] for place in range(chunk.drafted)]
    pieces = [f"\033[38;5;{colour}m{text}\033[0m" for text, colour in zip(chunk.pieces, colours, strict=False) if text]
    return "".join([*pieces, *chunk.pieces[chunk.drafted :]])


class OrderedOutput:
    """Writes several growing answers one after the other: the first as it grows, the others after it.

    On leaving the context, also after an error, every ended answer is written.
    """

    def __init__(self, answers: int) -> None:
        self._waiting: list[list[tuple[TextIO, str]]] = [[] for _ in range(answers)]
        self._ended = [False] * answers
        self._current = 0  # the answer that is written as it grows

    def __enter__(self) -> OrderedOutput:
        return self

    def __exit__(self, *_: object) -> None:
        for index, ended in enumerate(self._ended):
            if ended:
                self._write(index)

    def put(self, index: int, text: str, file: TextIO | None = None) -> None:
        """Add text to an answer, for stdout or another file."""
        self._waiting[index].append((file or sys.stdout, text))
        if index == self._current:
            self._write(index)

    def end(self, index: int) -> None:
        """Mark an answer as complete."""
        self._ended[index] = True
        while self._current < len(self._ended):
            self._write(self._current)
            if not self._ended[self._current]:
                return
            self._current += 1

    def _write(self, index: int) -> None:
        for file, text in self._waiting[index]:
            file.write(text)
            file.flush()
        self._waiting[index].clear()
