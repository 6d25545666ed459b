"""Draft trees from plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from decode import Tree


def tree_of_rows(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tree:
    """A tree from each row's tokens and parents, root first (its parent is -1). Rows may differ in size."""
    width = max(len(tokens) for tokens, _ in rows)
    tokens = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens, _ in rows])
    parents = torch.tensor([[*parents, *[-1] * (width - len(parents))] for _, parents in rows])
    tree = Tree(tokens, parents, torch.tensor([len(tokens) for tokens, _ in rows]), height=width - 1)
    return replace(tree, height=int(tree.depth.max()))
