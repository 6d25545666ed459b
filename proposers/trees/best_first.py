"""The best nodes among a head's candidates, as a tree.

Shapes: B rows, N nodes, M candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode import Tree
from decode.gpu.fusion import fused


def choose_best(roots: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, budget: int) -> Tree:
    """The tree of the `budget` nodes (root included) with the best scores.

    roots [B]; tokens, parents, scores [B, M]: candidate j drafts `tokens[j]` after candidate `parents[j]` (-1: the
    root). A score is a path's log-probability, so no child scores above its parent. Ties go to the earlier candidate,
    hence to the parent; float32 keeps half precision from rounding more of them into existence.
    """
    chosen = min(budget - 1, tokens.shape[1])
    picked, above, best = _pick_best(roots, tokens, parents, scores, chosen)
    sizes = torch.full((len(tokens),), chosen + 1, device=tokens.device)
    return Tree(picked, above, sizes, height=chosen, scores=best)


@fused
def _pick_best(
    roots: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, chosen: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and scores of `choose_best`, of the root and `chosen` candidates."""
    batch, count = tokens.shape
    order = torch.sort(scores.float(), dim=1, descending=True, stable=True).indices[:, :chosen].sort(dim=1).values
    node = torch.full((batch, count + 1), -1, device=tokens.device)  # each candidate's node; last: the root's
    node.scatter_(1, order, torch.arange(1, chosen + 1, device=tokens.device).expand(batch, chosen))
    node[:, -1] = 0
    above = node.gather(1, parents.gather(1, order) % (count + 1))
    return (
        torch.cat([roots[:, None], tokens.gather(1, order)], dim=1),
        torch.cat([torch.full_like(roots[:, None], -1), above], dim=1),
        torch.cat([torch.zeros_like(scores[:, :1]), scores.gather(1, order)], dim=1),
    )
