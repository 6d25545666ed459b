"""Answers on a terminal: draft tokens in colour, several growing answers written in order, and SVG pictures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from html import escape
from itertools import count, groupby
from pathlib import Path
from typing import TextIO, TypeAlias

from decode import Chunk

# Colours of xterm's 256 for draft tokens 1, 2, ... tokens ahead: green over blue to pink.
RAMP = (114, 78, 79, 80, 81, 75, 69, 105, 141, 177, 176, 212)
LEVELS = (0, 95, 135, 175, 215, 255)  # of red, green and blue in these colours
BACKGROUND, INK = "#16181d", "#d7dae0"
COLUMNS = 88
CELL, LINE, MARGIN, FONT = 9, 21, 20, 15  # pixels: a character's width, a line's height

Piece: TypeAlias = tuple[str, int | None]  # text, and its colour of `RAMP` or None


def has_colour(file: TextIO) -> bool:
    """Whether the file is a terminal that shows colours (no-color.org)."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colour_pieces(chunk: Chunk) -> list[Piece]:
    """The chunk's text in pieces; accepted draft tokens have a colour."""
    colours = (RAMP[min(place, len(RAMP) - 1)] if place < chunk.drafted else None for place in count())
    return [(piece, colour) for piece, colour in zip(chunk.pieces, colours, strict=False) if piece]


def format_chunk(chunk: Chunk, coloured: bool) -> str:
    """The chunk's text, with terminal colours for accepted draft tokens if `coloured`."""
    if not coloured:
        return chunk.text
    pieces = colour_pieces(chunk)
    return "".join(text if colour is None else f"\033[38;5;{colour}m{text}\033[0m" for text, colour in pieces)


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


def draw_terminal(pieces: Sequence[Piece], path: Path) -> None:
    """Write the pieces as lines of an SVG file."""
    cells = [(character, colour) for text, colour in pieces for character in text]
    lines = list(wrap(cells))
    width, height = 2 * MARGIN + COLUMNS * CELL, 2 * MARGIN + len(lines) * LINE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="{FONT}">',
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
    ]
    for number, line in enumerate(lines):
        column, y = 0, MARGIN + number * LINE + FONT
        for colour, run in groupby(line, key=lambda cell: cell[1]):
            text = "".join(character for character, _ in run)
            # A run's place and length are given, so that any monospaced font keeps the columns aligned.
            place = f'x="{MARGIN + column * CELL}" y="{y}" textLength="{len(text) * CELL}"'
            parts.append(f'<text {place} fill="{to_hex(colour)}" xml:space="preserve">{escape(text)}</text>')
            column += len(text)
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def wrap(cells: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """Lines of at most `COLUMNS` characters, broken at line breaks and spaces."""
    text = "".join(character for character, _ in cells)
    start = 0
    for line in text.split("\n"):
        stop = start + len(line)
        while stop - start > COLUMNS:
            space = text.rfind(" ", start + 1, start + COLUMNS + 1)
            end = start + COLUMNS if space < 0 else space
            yield cells[start:end]
            start = end + (text[end] == " ")
        yield cells[start:stop]
        start = stop + 1


def to_hex(colour: int | None) -> str:
    """The RGB value of one of xterm's colours 16 to 231."""
    if colour is None:
        return INK
    red, rest = divmod(colour - 16, 36)
    return "#" + "".join(f"{LEVELS[level]:02x}" for level in (red, *divmod(rest, 6)))
