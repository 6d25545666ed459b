"""Traversal verification of sampled trees, all rows at once and without a wait.

`decode.rejection.accept_by_traversal` stops at the first node that it accepts. But what it computes for a node assumes
that every node before it was rejected, so it does not depend on chance. Here all of it is computed first, node by node
in an order that has parents before children. Then all decisions are made together, with the same random numbers.

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decode.gpu.fusion import fused
from decode.noise import inverse_cdf, to_uniforms
from decode.sampling import Sampling
from decode.tree import Tree


class Nodes(NamedTuple):
    """The tensors of `Tree` by name; q is not None."""

    tokens: Tensor
    parents: Tensor
    real: Tensor
    ancestors: Tensor
    depth: Tensor
    q: Tensor
    sampled: Tensor | None


def judge_sampled_trees(tree: Tree, logits: Tensor, sampling: Sampling, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The accepted path, [B, N] bool, and the bonus token [B], -1 where the row's logits are NaN or infinite.

    logits [B, N, V]; keys [B, >= N]: a row uses their noise in order, one for each node that it tests and one for the
    bonus token. Without logits processors.
    """
    assert tree.q is not None
    p = sampling.probabilities(logits.flatten(0, 1)).view(logits.shape)
    broken = (p[:, :, 0].isnan() & tree.real).any(dim=1)
    on_path, bonus = _judge(Nodes(*(getattr(tree, name) for name in Nodes._fields)), p, to_uniforms(keys))
    return on_path, torch.where(broken, -1, bonus)


@fused
def _judge(tree: Nodes, p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """`judge_sampled_trees` by the target's probabilities p [B, N, V], which are overwritten."""
    rows = torch.arange(len(p), device=p.device)
    order = order_siblings(tree)
    p_path = compute_residuals(tree, order, p)
    post = find_post_order(tree, order)
    tested = (p_path > 0) & tree.real
    tested[:, 0] = False  # the root is accepted if nothing else is
    before = (tested[:, None] & (post[:, None] < post[:, :, None])).sum(dim=2)  # [B, N] tests before a node's own
    accepted = tested & (uniforms.gather(1, before) < p_path)
    accepted[:, 0] = True
    last = torch.where(accepted, post, tree.tokens.shape[1]).argmin(dim=1)
    used = (before + tested)[rows, last]
    return tree.ancestors[rows, last], inverse_cdf(p[rows, last], uniforms[rows, used])


def order_siblings(tree: Nodes) -> Tensor:
    """The nodes [B, N] level by level, in each level sampled ones first, padding last."""
    level = torch.where(tree.real, tree.depth, tree.tokens.shape[1])
    if tree.sampled is not None:
        level = 2 * level + ~tree.sampled
    return level.sort(dim=1, stable=True).indices


def compute_residuals(tree: Nodes, order: Tensor, p: Tensor) -> Tensor:
    """Replace each node's p by what its rejected children leave of it, and return the p_path [B, N] left then.

    A p_path of 0 says that a node is not reached.
    """
    q, inverse = find_draft_probabilities(tree, order)
    rows = torch.arange(len(p), device=p.device)
    p_path = torch.zeros_like(p[:, :, 0])
    p_path[:, 0] = 1
    parents, tokens = tree.parents.clamp(min=0), tree.tokens
    for step in range(1, tree.tokens.shape[1]):
        node = order[:, step]
        parent, token = parents[rows, node], tokens[rows, node]
        above, left = p_path[rows, parent], p[rows, parent]  # [B], [B, V]
        p_path[rows, node] = (left[rows, token] * inverse[rows, node] * above).clamp(max=1)
        excess = (above[:, None] * left - q[rows, node]).clamp_(min=0)
        mass = excess.sum(dim=1)
        some = mass > 0  # else nothing is left; where p_path is 1 only rounding leads here
        p_path[rows, parent] = torch.where(some, mass / (mass + (1 - above)), above >= 1)
        p[rows, parent] = torch.where(some[:, None], excess / mass[:, None], left)
    return p_path


def find_draft_probabilities(tree: Nodes, order: Tensor) -> tuple[Tensor, Tensor]:
    """The draft's probabilities [B, N, V] when each node was drafted, and 1 / that of its own token [B, N].

    Sampled tokens: those of the parent without the siblings sampled before. Both are 0 where nothing is to be decided:
    at the root, padding, and a sampled token that its siblings left no probability.
    """
    vocabulary = tree.q.shape[2]
    parents = tree.parents.clamp(min=0)
    q = tree.q.double().take_along_dim(parents[:, :, None], dim=1)  # [B, N, V]
    tokens = tree.tokens[:, None].expand(-1, tree.tokens.shape[1], -1)  # [B, N, N]
    before = find_earlier_siblings(tree, order)
    if tree.sampled is not None:
        before = before & tree.sampled[:, None]
    # Two siblings may have the same token, which must not be written back.
    gone = torch.zeros_like(q).scatter_add_(2, tokens, before.double())
    q = q.masked_fill_(gone > 0, 0)
    q = q / q.sum(dim=2, keepdim=True)
    if tree.sampled is not None:
        one_hot = torch.nn.functional.one_hot(tree.tokens, vocabulary).double()
        q = torch.where(tree.sampled[:, :, None], q, one_hot)
    drafted = q.gather(2, tree.tokens[:, :, None])[:, :, 0]
    decided = (drafted > 0) & tree.real
    decided[:, 0] = False
    return torch.where(decided[:, :, None], q, 0), torch.where(decided, 1 / drafted, 0)


def find_earlier_siblings(tree: Nodes, order: Tensor) -> Tensor:
    """[B, N, N] bool: whether node j is a sibling of node i and comes before it."""
    place = order.argsort(dim=1)
    siblings = (tree.parents[:, :, None] == tree.parents[:, None]) & tree.real[:, None] & tree.real[:, :, None]
    return siblings & (place[:, None] < place[:, :, None])


def find_post_order(tree: Nodes, order: Tensor) -> Tensor:
    """Each node's place [B, N] in the order in which nodes are decided: after all nodes below it."""
    below = (tree.ancestors & tree.real[:, :, None]).sum(dim=1)  # [B, N] nodes of the subtree
    skipped = (find_earlier_siblings(tree, order) * below[:, None]).sum(dim=2)  # in subtrees of earlier siblings
    return (tree.ancestors * skipped[:, None]).sum(dim=2) + below - 1
