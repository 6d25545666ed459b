"""Fixed draft trees: which of a head's ranked guesses are tried, whatever the text.

A tree is a list of paths in order of preference; path (0, 2) is the guess of rank 2 behind the guess of rank 0, the
likeliest. Shapes: W paths followed further, C nodes of a level, M nodes, root not included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

Ranks: TypeAlias = tuple[int, ...]  # a node by the ranks of the guesses that lead to it, 0 the likeliest

# Trees that were published, a digit for each rank. All but the last: Medusa (Cai et al. 2024; Apache-2.0), from
# medusa/model/medusa_choices.py of github.com/FasterDecoding/Medusa, measured on Vicuna's and Zephyr's own heads; the
# last: EAGLE-1 (Li et al. 2024; Apache-2.0), from model/choices.py of github.com/SafeAILab/EAGLE, made by hand.
_PUBLISHED = {
    "mc_sim_7b_63": """
        0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000
        011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
    """,
    "vicuna_7b_stage1": """
        0 00 1 2 01 10 3 02 4 000 03 5 20 04 6 05 11 001 7 30 06 8 9 010 07 08 40 002 12 09 21 50 100 003 13 020 011 004
        60 14 005 22 030 31 006 70 15 101 200 007 80 0000 41 012 040 90 021 23 16 008 050 32 51
    """,
    "vicuna_7b_stage2": """
        0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004 40 12 08 7 030 0001
        005 21 006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60 9 013 0003 102 050 31 0020 70 14
    """,
    "vicuna_13b_stage1": """
        0 00 1 01 2 10 000 02 3 03 4 20 04 001 05 5 11 010 6 06 002 7 30 8 07 08 100 003 40 12 9 09 21 020 004 13 011
        005 50 030 0000 006 60 14 200 012 31 040 101 22 007 15 70 008 80 050 009 021 110 013 41 23 16
    """,
    "vicuna_13b_stage2": """
        0 00 1 000 01 10 2 02 001 010 3 03 20 002 0000 04 100 11 4 003 05 020 5 30 011 06 004 0001 07 005 12 0010 030
        101 40 006 08 200 09 6 7 21 50 012 0002 8 040 0100 021 007 110 13 0020 9 008 050 0003 009 013 102 0011 300 1000
    """,
    "vicuna_33b_stage1": """
        0 1 00 2 01 3 10 4 02 5 03 000 6 04 20 7 11 05 30 8 9 06 07 001 12 40 010 08 09 21 002 50 13 003 100 14 60 020
        31 22 004 70 011 15 41 005 030 90 80 16 006 23 012 32 040 200 17 101 007 51 24 008 021
    """,
    "vicuna_33b_stage2": """
        0 00 1 01 000 10 2 02 001 03 3 010 20 04 4 002 11 100 05 5 0000 003 30 020 06 011 6 004 07 7 12 40 8 030 005
        0001 08 21 09 101 200 006 50 0010 13 012 040 007 021 9 110 0002 60 008 0100 70 013 050 14 009 31 102 22
    """,
    "zephyr_stage2": """
        0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003 100 09 020 12 40 8 9 21 011 004 0000
        50 030 13 005 006 60 200 101 012 040 14 31 22 007 70 021 008 013 050 15 009 110 0001 0010 41 23
    """,
    "eagle_25": """
        0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001
    """,
}
PUBLISHED: dict[str, tuple[Ranks, ...]] = {
    name: tuple(tuple(map(int, word)) for word in words.split()) for name, words in _PUBLISHED.items()
}


def check_tree(paths: Iterable[Sequence[int]]) -> tuple[Ranks, ...]:
    """The paths, each once and behind its beginnings. Raises ValueError where they are not a tree."""
    given = [tuple(path) for path in paths]
    for path in given:
        if not path or not all(isinstance(rank, int) and rank >= 0 for rank in path):
            raise ValueError(f"{path} is no path of a tree; a path is one rank or more, each a whole number from 0 on")
    known = set(given)
    for path in given:
        missing = next((path[:end] for end in range(1, len(path)) if path[:end] not in known), None)
        if missing is not None:
            raise ValueError(f"the tree has the path {path} but not {missing}, which it begins with")
    return tuple(dict.fromkeys(path[:end] for path in given for end in range(1, len(path) + 1)))


def cut_tree(paths: Sequence[Ranks], depth: int, ranks: int, nodes: int) -> tuple[Ranks, ...]:
    """What of a checked tree is at most `depth` deep, names ranks below `ranks` and is among the first `nodes`."""
    kept = tuple(path for path in paths if len(path) <= depth and max(path) < ranks)[:nodes]
    if not kept:
        raise ValueError(f"the tree has no path with ranks below {ranks}, the tokens that the head can guess")
    return kept


@dataclass(frozen=True)
class Level:
    """The nodes of one depth."""

    above: Tensor  # [C] long: which of the paths followed at the level before a node continues
    ranks: Tensor  # [C] long
    followed: Tensor  # [W] long: those nodes that have children
    origin: Tensor  # [W] long: `above` of these
    places: Tensor  # [W] long: where these stand in order of preference
    most: int  # the number of ranks to look at


@dataclass(frozen=True)
class Shape:
    """A fixed tree as tensors."""

    parents: Tensor  # [M] long, in order of preference; -1: the root
    order: Tensor  # [M] long: where a node stands when they are listed level by level
    levels: list[Level]

    @classmethod
    def of(cls, paths: Sequence[Ranks], device: torch.device) -> Shape:
        """Of a checked tree with at least one path."""
        tensor = partial(torch.tensor, dtype=torch.long, device=device)
        inner = {path[:-1] for path in paths}
        place = {path: index for index, path in enumerate(paths)}
        listed: list[Ranks] = []
        levels: list[Level] = []
        before: list[Ranks] = [()]
        for depth in range(1, max(map(len, paths)) + 1):
            level = [path for path in paths if len(path) == depth]
            ranks = [path[-1] for path in level]
            above = [before.index(path[:-1]) for path in level]
            followed = [node for node, path in enumerate(level) if path in inner]
            origin = [above[node] for node in followed]
            before = [level[node] for node in followed]
            places = [place[path] for path in before]
            levels.append(
                Level(tensor(above), tensor(ranks), tensor(followed), tensor(origin), tensor(places), 1 + max(ranks))
            )
            listed += level
        stands = {path: index for index, path in enumerate(listed)}
        return cls(
            parents=tensor([place.get(path[:-1], -1) for path in paths]),
            order=tensor([stands[path] for path in paths]),
            levels=levels,
        )
