"""Checking trees that were made on a GPU, without a wait.

Shapes: B rows, N nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.tree import Tree, find_ancestors


def check_on_device(tree: Tree, roots: Tensor, budget: int, vocabulary: int) -> Tree:
    """The tree with its faults mended, and `wrong` [B] marking the rows that had one.

    A wrong index would end the process on a GPU. The loop reads `wrong` with the accepted path and then raises what
    `Tree.check` says. roots [B]: the bonus tokens, which replace the trees' own roots.
    """
    known = vars(tree).get("ancestors") if tree.is_chain else None  # what is known of a chain stays true
    limit = min(budget, tree.width, tree.height + 1 if tree.is_chain else tree.width)
    return tree.with_tensors(
        _mend(tree.tokens, tree.parents, tree.sizes, roots, known, limit, vocabulary, tree.height, tree.is_chain)
    )


def _mend(
    given: Tensor,
    given_parents: Tensor,
    given_sizes: Tensor,
    roots: Tensor,
    ancestors: Tensor | None,
    limit: int,
    vocabulary: int,
    height: int,
    is_chain: bool,
) -> dict[str, Tensor]:
    """Mend a tree, given by its tensors, and mark the rows with faults. Returns its tensors by name, cached ones too.

    ancestors: None if unknown. limit: nodes at most.
    """
    node = torch.arange(given.shape[1], device=given.device)
    sizes = given_sizes.clamp(1, limit)
    real = node < sizes[:, None]
    tokens = torch.where(node > 0, given.clamp(0, vocabulary - 1), roots[:, None])
    parents = torch.where(real, node - 1 if is_chain else given_parents.clamp(min=0).minimum(node - 1), -1)
    ancestors = find_ancestors(parents, height) if ancestors is None else ancestors
    depth = (ancestors.sum(dim=2) - 1).clamp(max=height)
    too_deep = depth != depth.gather(1, parents.clamp(min=0)) + 1
    wrong = (real & (node > 0) & ((tokens != given) | too_deep)) | (parents != given_parents)
    return {
        "tokens": tokens,
        "parents": parents,
        "sizes": sizes,
        "real": real,
        "ancestors": ancestors,
        "depth": depth,
        "wrong": wrong.any(dim=1) | (sizes != given_sizes),
    }
