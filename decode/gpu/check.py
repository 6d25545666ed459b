"""Checking trees that were made on a GPU, without a wait.

Shapes: B rows, N nodes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from decode.tree import Tree


def check_on_device(tree: Tree, roots: Tensor, budget: int, vocabulary: int) -> Tree:
    """The tree with its faults mended, and `wrong` [B] marking the rows that had one.

    A wrong index would end the process on a GPU. The loop reads `wrong` with the accepted path and then raises what
    `Tree.check` says. roots [B]: the bonus tokens, which replace the trees' own roots.
    """
    node = torch.arange(tree.width, device=tree.tokens.device)
    deepest = tree.height + 1 if tree.is_chain else tree.width
    sizes = tree.sizes.clamp(1, min(budget, tree.width, deepest))
    real = node < sizes[:, None]
    tokens = tree.tokens.clamp(0, vocabulary - 1)
    tokens[:, 0] = roots
    parents = torch.where(real, tree.parents.clamp(min=0).minimum(node - 1), -1)
    if tree.is_chain:
        parents = torch.where(real, node - 1, -1)
    wrong = (tokens != tree.tokens) & real
    wrong[:, 0] = False
    wrong |= parents != tree.parents
    mended = replace(tree, tokens=tokens, parents=parents, sizes=sizes)
    if tree.is_chain:  # what is known of a chain stays true
        mended = mended.with_tensors({name: vars(tree)[name] for name in ("ancestors", "depth") if name in vars(tree)})
    depth = mended.depth
    wrong[:, 1:] |= real[:, 1:] & (depth[:, 1:] != depth.gather(1, parents[:, 1:].clamp(min=0)) + 1)
    # Not `replace`, which would forget the ancestors that were computed.
    return mended.with_tensors({"wrong": wrong.any(dim=1) | (sizes != tree.sizes)})
