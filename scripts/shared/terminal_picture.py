"""A terminal's text as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

COLUMNS = 88
CELL, LINE, MARGIN, FONT = 9, 21, 20, 15  # pixels: a character's width, a line's height
BACKGROUND, TEXT = "#16181d", "#d7dae0"
LEVELS = (0, 95, 135, 175, 215, 255)  # of red, green and blue in xterm's colour cube


def draw_terminal(pieces: Sequence[tuple[str, int | None]], path: Path) -> None:
    """Write the pieces, each with one of xterm's colours 16 to 231 or None, as an SVG file of wrapped lines."""
    cells = [(character, colour) for text, colour in pieces for character in text]
    lines = list(wrap(cells))
    width, height = 2 * MARGIN + COLUMNS * CELL, 2 * MARGIN + len(lines) * LINE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="{FONT}">',
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


def wrap(cells: Sequence[tuple[str, int | None]]) -> Iterator[Sequence[tuple[str, int | None]]]:
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
        return TEXT
    red, rest = divmod(colour - 16, 36)
    return "#" + "".join(f"{LEVELS[level]:02x}" for level in (red, *divmod(rest, 6)))
