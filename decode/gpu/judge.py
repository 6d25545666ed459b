"""Traversal verification of sampled trees, all rows at once and without a wait.

`decode.rejection.accept_by_traversal` stops at the first node that it accepts. But what it computes for a node assumes
that every node before it was rejected, so it does not depend on chance. Here all of it is computed first, node by node
in an order that has parents before children. Then all decisions are made together, with the same random numbers.

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from decode.gpu.fusion import fused
from decode.noise import inverse_cdf, to_uniforms
from decode.sampling import NO_TOKEN, Sampling
from decode.tree import Tree

MOST = 1 << 27  # probabilities that are computed at once: a gigabyte


class Nodes(NamedTuple):
    """Tensors of `Tree` by name; q is not None. Sampled nodes come before their other siblings."""

    tokens: Tensor
    parents: Tensor
    real: Tensor
    ancestors: Tensor
    q: Tensor
    sampled: Tensor | None


def judge_sampled_trees(tree: Tree, logits: Tensor, sampling: Sampling, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The accepted path, [B, N] bool, and the bonus token [B], NO_TOKEN where its logits are NaN or infinite.

    logits [B, N, V]; keys [B, >= N]: a row uses their noise in order, one for each node that it tests and one for the
    bonus token. Without logits processors. Large batches are judged in parts, to save memory.
    """
    size = max(1, MOST // (tree.width * logits.shape[2]))  # rows
    if tree.batch <= size:
        return _judge_part(tree, logits, sampling, keys)
    parts = zip(_split(tree, size), logits.split(size), keys.split(size), strict=True)
    judged = [_judge_part(part, part_logits, sampling, part_keys) for part, part_logits, part_keys in parts]
    on_path, bonus = (torch.cat(part) for part in zip(*judged, strict=True))
    return on_path, bonus


def _split(tree: Tree, size: int) -> list[Tree]:
    """The trees of so many rows at a time."""
    tensors = {name: tensor.split(size) for name, tensor in tree.tensors().items()}
    return [tree.with_tensors(dict(zip(tensors, part, strict=True))) for part in zip(*tensors.values(), strict=True)]


def _judge_part(tree: Tree, logits: Tensor, sampling: Sampling, keys: Tensor) -> tuple[Tensor, Tensor]:
    """`judge_sampled_trees` for a part of the batch."""
    p = sampling.probabilities(logits.flatten(0, 1)).view(logits.shape)
    nodes, order = Nodes(*(getattr(tree, name) for name in Nodes._fields)), None
    if tree.sampled is not None:  # level by level, sampled siblings first
        order = (2 * tree.depth.where(tree.real, tree.width) + ~tree.sampled).sort(dim=1, stable=True).indices
        nodes, p = reorder(nodes, order), p.take_along_dim(order[:, :, None], dim=1)
    on_path, bonus = _judge(nodes, p, to_uniforms(keys))
    if order is not None:
        on_path = torch.empty_like(on_path).scatter_(1, order, on_path)
    return on_path, bonus


def reorder(nodes: Nodes, order: Tensor) -> Nodes:
    """The nodes in another order [B, N] that has the root first and parents before children."""
    parents = order.argsort(dim=1).gather(1, nodes.parents.gather(1, order).clamp(min=0))
    parents[:, 0] = -1  # what padding has for a parent does not matter
    across, down = order[:, None], order[:, :, None]
    return Nodes(
        tokens=nodes.tokens.gather(1, order),
        parents=parents,
        real=nodes.real.gather(1, order),
        ancestors=nodes.ancestors.take_along_dim(down, dim=1).take_along_dim(across, dim=2),
        q=nodes.q.take_along_dim(down, dim=1),
        sampled=None if nodes.sampled is None else nodes.sampled.gather(1, order),
    )


@fused
def _judge(tree: Nodes, p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """`judge_sampled_trees` by the target's probabilities p [B, N, V].

    A node without probabilities (NaN) becomes a leaf.
    """
    rows = torch.arange(len(p), device=p.device)
    broken = p[:, :, 0].isnan()
    p = torch.where(broken[:, :, None], 1 / p.shape[2], p)
    on_way = (tree.ancestors & broken[:, None]).sum(dim=2)  # [B, N] broken nodes down to each, itself included
    tree = tree._replace(real=tree.real & (on_way <= broken))
    earlier = find_earlier_siblings(tree)
    left = compute_residuals(tree, *find_draft_probabilities(tree, earlier), p)
    p_path = left[:, :, -1]
    post = find_post_order(tree, earlier)
    tested = (p_path > 0) & tree.real
    tested[:, 0] = False  # the root is accepted if nothing else is
    before = (tested[:, None] & (post[:, None] < post[:, :, None])).sum(dim=2)  # [B, N] tests before a node's own
    accepted = tested & (uniforms.gather(1, before) < p_path)
    accepted[:, 0] = True
    last = torch.where(accepted, post, tree.tokens.shape[1]).argmin(dim=1)
    used = (before + tested)[rows, last]
    bonus = inverse_cdf(left[rows, last, :-1], uniforms[rows, used])
    return tree.ancestors[rows, last], torch.where(broken[rows, last], NO_TOKEN, bonus)


def compute_residuals(tree: Nodes, q: Tensor, inverse: Tensor, p: Tensor) -> Tensor:
    """Residuals once all of a node's children are rejected [B, N, V + 1]: p_path times its p, then p_path.

    A p_path of 0 says that a node is not reached. q, inverse: from `find_draft_probabilities`.
    """
    rows, nodes = (torch.arange(size, device=p.device) for size in inverse.shape)
    parents, tokens = tree.parents.clamp(min=0), tree.tokens[:, :, None]
    left, q = nn.functional.pad(p, (0, 1), value=1.0), nn.functional.pad(q, (0, 1))
    is_p_path = torch.arange(left.shape[2], device=p.device) == p.shape[2]
    for step in range(1, len(nodes)):
        parent, node = parents[:, step], nodes[step : step + 1]
        above = left[rows, parent]
        reached = (above.gather(1, tokens[:, step]) * inverse[:, step, None]).clamp(max=1)
        left[rows, node] = left[rows, node] * reached
        excess = (above - q[:, step]).clamp_(min=0)
        mass = excess[:, :-1].sum(dim=1, keepdim=True)
        rest = mass + (1 - above[:, -1:])  # 0: only rounding leads here, and nothing is taken away
        left[rows, parent] = torch.where(rest > 0, torch.where(is_p_path, mass, excess) / rest, above)
    return left


def find_draft_probabilities(tree: Nodes, earlier: Tensor) -> tuple[Tensor, Tensor]:
    """The draft's probabilities [B, N, V] when each node was drafted, and 1 / that of its own token [B, N].

    Sampled tokens: those of the parent without the siblings sampled before. Both are 0 where nothing is to be decided:
    at the root, padding, and a sampled token that its siblings left no probability.
    """
    vocabulary = tree.q.shape[2]
    parents = tree.parents.clamp(min=0)
    q = tree.q.double().take_along_dim(parents[:, :, None], dim=1)  # [B, N, V]
    tokens = tree.tokens[:, None].expand(-1, tree.tokens.shape[1], -1)  # [B, N, N]
    if tree.sampled is not None:
        earlier = earlier & tree.sampled[:, None]
    # Two siblings may have the same token, which must not be written back.
    gone = torch.zeros_like(q).scatter_add_(2, tokens, earlier.double())
    q = q.masked_fill_(gone > 0, 0)
    q = q / q.sum(dim=2, keepdim=True)
    if tree.sampled is not None:
        one_hot = nn.functional.one_hot(tree.tokens, vocabulary).double()
        q = torch.where(tree.sampled[:, :, None], q, one_hot)
    drafted = q.gather(2, tree.tokens[:, :, None])[:, :, 0]
    decided = (drafted > 0) & tree.real
    decided[:, 0] = False
    return torch.where(decided[:, :, None], q, 0), torch.where(decided, 1 / drafted, 0)


def find_earlier_siblings(tree: Nodes) -> Tensor:
    """[B, N, N] bool: whether node j is a sibling of node i and comes before it."""
    siblings = (tree.parents[:, :, None] == tree.parents[:, None]) & tree.real[:, None] & tree.real[:, :, None]
    return siblings.tril(-1)


def find_post_order(tree: Nodes, earlier: Tensor) -> Tensor:
    """Each node's place [B, N] in the order in which nodes are decided: after all nodes below it."""
    below = (tree.ancestors & tree.real[:, :, None]).sum(dim=1)  # [B, N] nodes of the subtree
    skipped = (earlier * below[:, None]).sum(dim=2)  # in subtrees of earlier siblings
    return (tree.ancestors * skipped[:, None]).sum(dim=2) + below - 1
