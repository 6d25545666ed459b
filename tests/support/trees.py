"""Draft trees from plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decode import Tree


def tree_of_rows(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tree:
    """`Tree.of_rows` with the exact height."""
    tree = Tree.of_rows(rows)
    return replace(tree, height=int(tree.depth.max()))
