"""Checking trees that were made on a GPU, without a wait.

Shapes: B rows, N nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.trees.tree import Tree, find_ancestors


def check_on_device(tree: Tree, roots: Tensor, budget: int, vocabulary: int) -> Tree:
    """The tree with its faults mended, and `wrong` [B] marking the rows that had one.

    A wrong index would end the process on a GPU. The loop reads `wrong` with the accepted path and then raises what
    `Tree.check` says. roots [B]: the bonus tokens, which replace the trees' own roots.
    """
    known = vars(tree).get("ancestors") if tree.is_chain else None  # what is known of a chain stays true
    limit = min(budget, tree.width, tree.height + 1 if tree.is_chain else tree.width)
    node = torch.arange(tree.width, device=tree.tokens.device)
    sizes = tree.sizes.clamp(1, limit)
    real = node < sizes[:, None]
    tokens = torch.where(node > 0, tree.tokens.clamp(0, vocabulary - 1), roots[:, None])
    parents = torch.where(real, node - 1 if tree.is_chain else tree.parents.clamp(min=0).minimum(node - 1), -1)
    ancestors = find_ancestors(parents, tree.height) if known is None else known
    depth = (ancestors.sum(dim=2) - 1).clamp(max=tree.height)
    too_deep = depth != depth.gather(1, parents.clamp(min=0)) + 1
    wrong = (real & (node > 0) & ((tokens != tree.tokens) | too_deep)) | (parents != tree.parents)
    return tree.with_tensors(
        {
            "tokens": tokens,
            "parents": parents,
            "sizes": sizes,
            "real": real,
            "ancestors": ancestors,
            "depth": depth,
            "wrong": wrong.any(dim=1) | (sizes != tree.sizes),
        }
    )
