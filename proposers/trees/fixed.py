"""Fixed draft trees: which ranks of a head's tokens become nodes, whatever the text.

A tree is a list of paths in order of preference. Path (0, 2) is the token of rank 2 after the token of rank 0, the
most likely one. Shapes: W paths followed further, C nodes of a level, M nodes without the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

Ranks: TypeAlias = tuple[int, ...]  # a node, by the ranks of the tokens that lead to it


def read_paths(text: str) -> tuple[Ranks, ...]:
    """The paths that a line of words stands for: a word is a path, and each of its digits a rank."""
    return tuple(tuple(map(int, path)) for path in text.split())


# `mc_sim_7b_63` of github.com/FasterDecoding/Medusa, medusa/model/medusa_choices.py, under Apache-2.0. It was measured
# on the heads of Vicuna.
MEDUSA_TREE = read_paths(
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 "
    "011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
)
# The tree of EAGLE-1 in github.com/SafeAILab/EAGLE, model/choices.py, under Apache-2.0. It was made by hand.
EAGLE_TREE = read_paths("0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001")


def check_tree(paths: Iterable[Sequence[int]]) -> tuple[Ranks, ...]:
    """The paths, each once and after its beginnings. Raises ValueError if they are no tree."""
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
    """The first `nodes` paths of a checked tree that are at most `depth` deep and use ranks below `ranks` only.

    Raises ValueError if there are none.
    """
    kept = tuple(path for path in paths if len(path) <= depth and max(path) < ranks)[:nodes]
    if not kept:
        raise ValueError(f"the tree has no path with ranks below {ranks}, the tokens that the head can draft")
    return kept


@dataclass(frozen=True)
class TreeLevel:
    """The nodes of one depth, as indices."""

    ranks_needed: int  # the highest rank plus one
    parents: Tensor  # [C] long: each node's parent, among the paths followed at the level before
    ranks: Tensor  # [C] long
    followed: Tensor  # [W] long: the nodes that have children
    followed_parents: Tensor  # [W] long: their `parents`
    places: Tensor  # [W] long: their place in order of preference


@dataclass(frozen=True)
class FixedTree:
    """A fixed tree as tensors."""

    parents: Tensor  # [M] long, in order of preference; -1: the root
    order: Tensor  # [M] long: each node's place if they are listed level by level
    levels: list[TreeLevel]

    @classmethod
    def from_paths(cls, paths: Sequence[Ranks], device: torch.device) -> FixedTree:
        """From a checked tree with at least one path."""
        tensor = partial(torch.tensor, dtype=torch.long, device=device)
        inner = {path[:-1] for path in paths}
        place = {path: index for index, path in enumerate(paths)}
        levels: list[TreeLevel] = []
        previous: list[Ranks] = [()]  # the paths followed at the level before
        for level in (list(group) for _, group in groupby(sorted(paths, key=len), key=len)):
            ranks = [path[-1] for path in level]
            parents = [previous.index(path[:-1]) for path in level]
            followed = [node for node, path in enumerate(level) if path in inner]
            previous = [level[node] for node in followed]
            followed_parents, places = [parents[node] for node in followed], [place[path] for path in previous]
            indices = map(tensor, (parents, ranks, followed, followed_parents, places))
            levels.append(TreeLevel(1 + max(ranks), *indices))
        number = {path: index for index, path in enumerate(sorted(paths, key=len))}
        return cls(
            parents=tensor([place.get(path[:-1], -1) for path in paths]),
            order=tensor([number[path] for path in paths]),
            levels=levels,
        )
