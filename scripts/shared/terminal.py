"""Answers as they come: draft tokens in colour, several growing answers in order, progress, and all at the end."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TextIO

from tqdm import tqdm

from decode import Answer, Chunk

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


def in_order(chunks: Iterable[Chunk], answers: int) -> Iterator[Chunk]:
    """The chunks of several growing answers, one answer after the other: the first as it grows, the others after it.

    If `chunks` raises, those of all ended answers come before the error.
    """
    waiting: list[list[Chunk]] = [[] for _ in range(answers)]
    current = 0  # the answer that is given as it grows
    try:
        for chunk in chunks:
            waiting[chunk.request_id].append(chunk)
            while current < answers and waiting[current]:
                given, waiting[current] = waiting[current], []
                yield from given
                if given[-1].answer is None:
                    break
                current += 1
    except (Exception, KeyboardInterrupt):
        for kept in waiting:
            if kept and kept[-1].answer is not None:
                yield from kept
        raise


def list_answers(chunks: Iterable[Chunk]) -> list[Answer]:
    """The answers of `chunks`, in the order of request ids. Raises ValueError for one that failed."""
    answers = {chunk.request_id: chunk.answer for chunk in chunks if chunk.answer is not None}
    if failed := [answer.error for answer in answers.values() if answer.error is not None]:
        raise ValueError(failed[0])
    return [answers[number] for number in sorted(answers)]


def show_progress(chunks: Iterable[Chunk], most: int) -> Iterator[Chunk]:
    """The chunks, and meanwhile a bar of their tokens, `most` at most, if stderr is a terminal."""
    with tqdm(total=most, unit=" tokens", leave=False, disable=None) as bar:
        for chunk in chunks:
            bar.update(len(chunk.tokens))
            yield chunk
