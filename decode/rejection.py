"""The acceptance rule for sampled draft tokens: it compares the target's p with the draft's q and stays unbiased.

The emitted tokens have exactly the target's distribution if the proposer keeps these conditions:
  - q is the distribution its tokens were sampled from, after temperature, top-k and top-p;
  - sampled siblings were sampled without replacement, in index order;
  - no node is dropped or moved because of its own token;
  - whether a node exists, and which token a deterministic node has, may depend on everything sampled before it, in any
    branch. But sampled siblings are decided before deterministic ones, so they must also be sampled before anything
    below a deterministic sibling.

Shapes: N nodes (node 0 is the root), V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode.sampling import NO_TOKEN


class Randomness(Protocol):
    """The random decisions of a rule: keyed noise in use, every possible outcome in tests."""

    def accept(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def draw(self, weights: Tensor) -> int:
        """A token, sampled by weights [V] >= 0 that need not sum to one."""
        ...


@dataclass(frozen=True)
class SampledTree:
    """One row's draft tree with the probabilities of target and draft, which are [V], float64, and sum to one."""

    tokens: Sequence[int]  # [N]
    parents: Sequence[int]  # [N]; -1 for the root; a parent comes before its children
    sampled: Sequence[bool]  # [N]; sampled from q(parent), else deterministic; the root's entry is ignored
    p: Callable[[int], Tensor]  # node -> the target's probabilities after it; NaN if its logits are no numbers
    q: Callable[[int], Tensor]  # node -> the draft's probabilities after it; called only for parents of sampled nodes


def accept_by_traversal(tree: SampledTree, randomness: Randomness) -> tuple[list[int], int]:
    """Traversal Verification (Weng et al., NeurIPS 2025, arXiv 2505.12398): the accepted path and the bonus token.

    It decides from the leaves up. On a chain it is block verification (Sun et al., ICLR 2025, algorithm 2), which
    accepts as much as any rule can.

    A node without probabilities (NaN) is a leaf, and the token after it is NO_TOKEN: that is as likely as in plain
    decoding.

    p_path is the probability of accepting the path down to a node, given the decisions so far. A child gets
    min(1, p_path p/q). When everything below it was rejected, p and p_path become their residuals.
    """
    children = _order_children(tree)

    def visit(node: int, p_path: float) -> tuple[list[int], int] | None:
        p = tree.p(node)
        is_broken = bool(p[0].isnan())  # all are NaN or none is
        for child, q in _propose_children(tree, node, [] if is_broken else children[node], p):
            token = tree.tokens[child]
            p_child = min(1.0, p_path * float(p[token] / q[token]))
            accepted = visit(child, p_child) if p_child > 0 else None
            if accepted is not None:
                return [node, *accepted[0]], accepted[1]
            p, p_path = _compute_residual(p, q, p_path)
            if p_path <= 0:
                return None
        if node == 0 or randomness.accept(p_path):  # at the root, p_path stays 1
            return [node], NO_TOKEN if is_broken else randomness.draw(p)
        return None

    accepted = visit(0, 1.0)
    assert accepted is not None  # the root is always kept
    return accepted


def _order_children(tree: SampledTree) -> list[list[int]]:
    """Each node's children, sampled ones before deterministic ones.

    In this order a mixed node accepts p(S) + sum min(p, q) over deterministic S and q off S, which is optimal (Hu et
    al., ICLR 2025). The other order would compare q with what S left of p, and accept less.
    """
    children: list[list[int]] = [[] for _ in tree.tokens]
    for sampled in (True, False):
        for node in range(1, len(tree.tokens)):
            if bool(tree.sampled[node]) is sampled:
                children[tree.parents[node]].append(node)
    return children


def _propose_children(tree: SampledTree, node: int, children: list[int], like: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The children in order, each with its draft probabilities [V] given that the ones before it were rejected.

    A sampled token without remaining probability is skipped: its siblings used up the support of q. So are all where q
    is NaN or infinite: `min(1, NaN)` would accept them.
    """
    q: Tensor | None = None
    for child in children:
        token = tree.tokens[child]
        if tree.sampled[child]:
            q = tree.q(node) if q is None else q
            total = q.sum()
            if not (q[token] > 0 and total.isfinite()):
                continue
            q = q / total  # a copy: the proposer's tensor is not changed
            yield child, q
            q[token] = 0
        else:
            one_hot = torch.zeros_like(like)
            one_hot[token] = 1
            yield child, one_hot


def _compute_residual(p: Tensor, q: Tensor, p_path: float) -> tuple[Tensor, float]:
    """After a rejected child: p becomes norm((p_path p - q)+), of mass S, and p_path becomes S / (S + 1 - p_path)."""
    excess = (p_path * p - q).clamp_(min=0)  # [V]
    mass = float(excess.sum())
    if mass <= 0:  # nothing is left; where p_path is 1 only rounding leads here
        return p, float(p_path >= 1)
    return excess / mass, mass / (mass + (1 - p_path))
