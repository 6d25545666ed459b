"""Acceptance rules for drafts that were drawn from a law: the path taken down a draft tree, without bias.

A draft that is a fixed guess needs no q and is walked with the target's own draws elsewhere. Here some nodes were
sampled, so a rule weighs how likely the target makes a token against how likely the draft did. Every rule emits
tokens whose law is exactly the target's; they differ in how many they emit a step.

    traversal  any tree, leaves before their ancestors: the longest paths of the three, looks at more nodes
    rrsw       any tree, root downwards, one decision a node: the reference, and it computes p on the fewest nodes
    block      one sampled chain: provably the longest (traversal gives the same law there), one batched computation

What the proposer owes, or no rule is exact:
  - q is the law its tokens were really drawn from, after temperature, top-k and top-p;
  - sampled siblings were drawn without replacement, in index order;
  - no node is dropped or moved for the token drawn at it;
  - a node's existence, and a deterministic one's token, may be chosen by all that was drawn before it, in any branch: a
    node with chance c is kept, or one below it, with probability c on average whatever grows there, so that verdict
    tells nothing about other branches. But siblings are judged sampled ones first, and so a sampled sibling's existence
    must not hang on what was drawn below a deterministic one: draw the sampled ones before growing below the others.

Shapes: B rows, N nodes (node 0 is the root), V vocabulary, k siblings.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Dice(Protocol):
    """Where a rule gets its randomness: a generator in use, every outcome in turn in the tests."""

    def accept(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def draw(self, weights: Tensor) -> int:
        """An index by its weight; weights [V] >= 0 need not sum to one."""
        ...


@dataclass(frozen=True)
class Drafted:
    """One row's draft tree as the rules see it. Laws are [V], float64, and sum to one."""

    tokens: Sequence[int]  # [N]; the root's is already chosen
    parents: Sequence[int]  # [N]; -1 for the root; a parent comes before its children
    sampled: Sequence[bool]  # [N]; drawn from q(parent), else deterministic; the root's entry is not read
    p: Callable[[int], Tensor]  # node -> the target's law after it
    q: Callable[[int], Tensor]  # node -> the law its first sampled child was drawn from; asked only where there is one


Rule = Callable[[Drafted, Dice], tuple[list[int], int]]  # -> the path, node indices from the root down; the bonus token


def traversal(drafted: Drafted, dice: Dice) -> tuple[list[int], int]:
    """Traversal Verification (Weng et al., NeurIPS 2025, arXiv 2505.12398): decide on whole paths, leaf to root.

    `chance` is the probability that the path down to a node is good enough to keep, given the draws decided so far.
    A child has min(1, chance p/q); when all below it was rejected, `p` and `chance` become what is left over.
    """
    families = _order_children(drafted)

    def visit(node: int, chance: float) -> tuple[list[int], int] | None:
        p = drafted.p(node)
        for child, token, q in _offer(drafted, node, families[node], p):
            child_chance = min(1.0, chance * float(p[token] / q[token]))
            found = visit(child, child_chance) if child_chance > 0 else None
            if found is not None:
                return [node, *found[0]], found[1]
            p, chance = _subtract(p, q, chance)
            if chance <= 0:  # nor can any later child have one
                return None
        if node == 0 or dice.accept(chance):  # the root's chance is 1 throughout
            return [node], dice.draw(p)
        return None

    verdict = visit(0, 1.0)
    assert verdict is not None  # the root is always kept
    return verdict


def rrsw(drafted: Drafted, dice: Dice) -> tuple[list[int], int]:
    """Recursive rejection sampling without replacement (RSD, Jeon et al. 2024; Sequoia, Chen et al. 2024).

    At each node offer the children in order, each against what its elder siblings' rejection left of p.
    """
    families = _order_children(drafted)
    path = [0]
    while True:
        node = path[-1]
        p = drafted.p(node)
        for child, token, q in _offer(drafted, node, families[node], p):
            if dice.accept(min(1.0, float(p[token] / q[token]))):
                path.append(child)
                break
            p, _ = _subtract(p, q, 1.0)
        else:
            return path, dice.draw(p)


def block(drafted: Drafted, dice: Dice) -> tuple[list[int], int]:
    """Block verification of one chain: `block_batch` for one row, its decisions taken from the last node upwards."""
    size = len(drafted.tokens)
    if list(drafted.parents) != list(range(-1, size - 1)) or not all(drafted.sampled[1:]):
        raise ValueError("block verification needs a single chain of sampled nodes; use traversal or rrsw for a tree")
    p = torch.stack([drafted.p(node) for node in range(size)])[None]  # [1, N, V]
    q = torch.stack([drafted.q(node) for node in range(size - 1)] + [torch.zeros_like(p[0, 0])])[None]
    sizes = torch.tensor([size], device=p.device)
    tokens = torch.tensor([list(drafted.tokens)], device=p.device)
    keep, joint = block_thresholds(tokens, sizes, p, q)
    node = next((node for node in range(size - 1, 0, -1) if dice.accept(float(keep[0, node]))), 0)
    weights = _weigh_bonus(torch.tensor([node], device=p.device), sizes, joint, p, q)
    return list(range(node + 1)), dice.draw(weights[0])


RULES: dict[str, Rule] = {"traversal": traversal, "rrsw": rrsw, "block": block}


def _order_children(drafted: Drafted) -> list[list[int]]:
    """Each node's children, sampled ones before deterministic ones.

    In this order a mixed node accepts p(S) + sum min(p, q) over deterministic S and q off S: the optimum for that draft
    (Hu et al., ICLR 2025). The other way round q would be matched to what S left, and accept less.
    """
    families: list[list[int]] = [[] for _ in drafted.tokens]
    for sampled in (True, False):
        for node in range(1, len(drafted.tokens)):
            if bool(drafted.sampled[node]) is sampled:
                families[drafted.parents[node]].append(node)
    return families


def _offer(drafted: Drafted, node: int, family: list[int], like: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """The children in order as (child, token, its law [V] given its elder siblings); resumed only after a rejection.

    A sampled token that the remaining law cannot give is not offered: the draws ran past the support of q.
    """
    q: Tensor | None = None
    for child in family:
        token = drafted.tokens[child]
        if drafted.sampled[child]:
            q = drafted.q(node) if q is None else q
            if q[token] <= 0:
                continue
            q = q / q.sum()  # a copy, so the proposer's own law stays whole
            yield child, token, q
            q[token] = 0  # and not 1 - q[token] for the sum: what is exhausted is exactly zero
        else:
            point = torch.zeros_like(like)
            point[token] = 1
            yield child, token, point


def _subtract(p: Tensor, q: Tensor, chance: float) -> tuple[Tensor, float]:
    """What a rejected child leaves: p becomes norm((chance p - q)+), of mass S, and chance S / (S + 1 - chance)."""
    excess = (chance * p - q).clamp_(min=0)  # [V]
    mass = float(excess.sum())
    if mass <= 0:  # the draft covers all there was: with chance 1 only rounding can lead here
        return p, float(chance >= 1)
    return excess / mass, mass / (mass + (1 - chance))


def block_batch(tokens: Tensor, sizes: Tensor, p: Tensor, q: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification of a chain a row (Sun et al., ICLR 2025, algorithm 2); no host sync, no loop over rows.

    tokens [B, N] with the root first; sizes [B] real nodes, the rest padding that may hold anything; p and q [B, N, V]
    the laws after each node (q is not read after a row's last); uniforms [B, >= N] in [0, 1): column i decides node i,
    so that column 0 and those from N on are free for the bonus token. Returns how many drafted tokens are
    accepted, [B], and the bonus token's law [B, V], not normalised.
    """
    keep, joint = block_thresholds(tokens, sizes, p, q)
    depth = torch.arange(tokens.shape[1], device=tokens.device)  # [N]
    # No early stop: the deepest node that is kept wins, whatever happened above it.
    accepted = torch.where(uniforms[:, : tokens.shape[1]] < keep, depth, 0).amax(dim=1)  # [B]
    return accepted, _weigh_bonus(accepted, sizes, joint, p, q)


def block_thresholds(tokens: Tensor, sizes: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's h_i and p_i of every node, [B, N] each: keep node i where a uniform is below h_i. Zero on padding.

    p_i = min(1, p_{i-1} p(X_i) / q(X_i)) is the chance of the path to X_i; with S_i = sum (p_i p - q)+ after it,
    h_i = S_i / (S_i + 1 - p_i), and at the last node h = p_i.
    """
    depth = torch.arange(tokens.shape[1], device=tokens.device)  # [N]
    real = depth < sizes[:, None]  # [B, N]
    index = torch.where(real, tokens, 0)[:, 1:, None]  # [B, N - 1, 1]
    given = q[:, :-1].gather(2, index).squeeze(2)  # [B, N - 1]
    ratio = torch.where(given > 0, p[:, :-1].gather(2, index).squeeze(2) / given, 0)
    chances = [torch.ones_like(p[:, 0, 0])]  # [B] each
    for i in range(1, tokens.shape[1]):
        chances.append(torch.where(real[:, i], (chances[-1] * ratio[:, i - 1]).clamp(max=1), 0))
    joint = torch.stack(chances, dim=1)  # [B, N]
    mass = (joint[..., None] * p - q).clamp_(min=0).sum(dim=2)  # [B, N]
    total = mass + (1 - joint)
    keep = torch.where(total > 0, mass / total, 1)  # 0 / 0 where p = q and nothing was lost above
    return torch.where(depth == sizes[:, None] - 1, joint, torch.where(real, keep, 0)), joint


def _weigh_bonus(accepted: Tensor, sizes: Tensor, joint: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """The bonus token's law [B, V] after the accepted node: p at the last one, else (p_i p - q)+."""
    row = accepted[:, None, None].expand(-1, 1, p.shape[2])  # [B, 1, V]
    p_row, q_row = p.gather(1, row).squeeze(1), q.gather(1, row).squeeze(1)
    excess = (joint.gather(1, accepted[:, None]) * p_row - q_row).clamp(min=0)
    whole = (accepted == sizes - 1)[:, None] | (excess.sum(dim=1, keepdim=True) <= 0)  # the second by rounding alone
    return torch.where(whole, p_row, excess)


def sample_siblings(q: Tensor, k: int, uniforms: Tensor) -> Tensor:
    """Draw k tokens a row without replacement from q [B, V], in the order drawn: [B, k].

    Gumbel-top-k (Kool et al., ICML 2019): one key log q + Gumbel a token, and the largest keys, sorted, are the ordered
    draws. uniforms [B, V] in [0, 1) must be float64, as 24-bit noise misses the tail of a large vocabulary. Where q has
    fewer than k tokens the rest are tokens of no mass, which the rules do not offer.
    """
    if uniforms.dtype != torch.float64 or uniforms.shape != q.shape:
        raise ValueError(f"need float64 uniforms of shape {list(q.shape)}, got {uniforms.dtype} {list(uniforms.shape)}")
    if not 1 <= k <= q.shape[1]:
        raise ValueError(f"cannot draw {k} different tokens of {q.shape[1]}; k must be from 1 to that")
    inside = uniforms.clamp(min=torch.finfo(torch.float64).tiny, max=1 - 2.0**-53)  # both logarithms finite
    keys = q.double().log() - (-inside.log()).log()  # [B, V]
    return keys.topk(k, dim=1, sorted=True).indices
