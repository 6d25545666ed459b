"""Guesses that were accepted, in colour."""

from __future__ import annotations

import os
from typing import TextIO

from decode import Chunk

RAMP = (114, 78, 79, 80, 81, 75, 69, 105, 141, 177, 176, 212)  # of the 256 colours: green over blue to pink


def paints(file: TextIO) -> bool:
    """Whether a file is a terminal that may be painted (no-color.org)."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def show(chunk: Chunk, painted: bool) -> str:
    """A chunk's text; `painted`: what was guessed and accepted in colour, by how many tokens ahead it was guessed."""
    if not painted:
        return chunk.text
    colours = RAMP + RAMP[-1:] * chunk.drafted
    guessed = zip(colours, chunk.pieces[: chunk.drafted], strict=False)
    pieces = [f"\033[38;5;{colour}m{piece}\033[0m" if piece else "" for colour, piece in guessed]
    return "".join(pieces + chunk.pieces[chunk.drafted :])
