"""Acceptance rules for one row: those in use, and simple ones to compare them with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decode.rejection import Randomness, SampledTree, accept_by_traversal

RowRule = Callable[[SampledTree, Randomness], tuple[list[int], int]]  # -> the accepted path; the bonus token


def walk_row(tree: SampledTree, randomness: Randomness) -> tuple[list[int], int]:
    """The rule for deterministic drafts: draw the target's token, descend while a child has it."""
    path = [0]
    while True:
        token = randomness.draw(tree.p(path[-1]))
        children = [i for i, parent in enumerate(tree.parents) if parent == path[-1] and tree.tokens[i] == token]
        if not children:
            return path, token
        path.append(children[0])


def rrsw(tree: SampledTree, randomness: Randomness) -> tuple[list[int], int]:
    """Recursive rejection sampling without replacement (RSD, Jeon et al. 2024; Sequoia, Chen et al. 2024).

    At each node the children are tested in order, sampled ones first, against what earlier rejections left of p.
    """
    path = [0]
    while True:
        p, q = tree.p(path[-1]), None
        children = [node for node in range(1, len(tree.tokens)) if tree.parents[node] == path[-1]]
        for child in sorted(children, key=lambda child: not tree.sampled[child]):
            token = tree.tokens[child]
            if tree.sampled[child]:
                q = tree.q(path[-1]).clone() if q is None else q
                if q[token] <= 0:  # q has no tokens left
                    continue
                draft = q / q.sum()
                q[token] = 0
            else:
                draft = torch.zeros_like(p)
                draft[token] = 1
            if randomness.accept(min(1.0, float(p[token] / draft[token]))):
                path.append(child)
                break
            rest = (p - draft).clamp(min=0)
            p = rest / rest.sum() if rest.sum() > 0 else p
        else:
            return path, randomness.draw(p)


def block(tree: SampledTree, randomness: Randomness) -> tuple[list[int], int]:
    """Block verification of one chain (Sun et al., ICLR 2025, algorithm 2), decided from the last node up."""
    size = len(tree.tokens)
    if list(tree.parents) != list(range(-1, size - 1)) or not all(tree.sampled[1:]):
        raise ValueError("block verification needs a single chain of sampled nodes")
    p = torch.stack([tree.p(node) for node in range(size)])[None]  # [1, N, V]
    q = torch.stack([tree.q(node) for node in range(size - 1)] + [torch.zeros_like(p[0, 0])])[None]
    sizes, tokens = torch.tensor([size]), torch.tensor([list(tree.tokens)])
    thresholds, p_path = block_thresholds(tokens, sizes, p, q)
    last = next((node for node in range(size - 1, 0, -1) if randomness.accept(float(thresholds[0, node]))), 0)
    weights = bonus_weights(torch.tensor([last]), sizes, p_path, p, q)
    return list(range(last + 1)), randomness.draw(weights[0])


def block_thresholds(tokens: Tensor, sizes: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's h_i (accept node i if a uniform is below it) and p_i, [B, N] each; zero on padding.

    p_i = min(1, p_{i-1} p(X_i) / q(X_i)) is the p_path of node i. With S_i = sum (p_i p - q)+ after it,
    h_i = S_i / (S_i + 1 - p_i), and h = p_i at the last node.
    """
    depth = torch.arange(tokens.shape[1], device=tokens.device)  # [N]
    real = depth < sizes[:, None]  # [B, N]
    index = torch.where(real, tokens, 0)[:, 1:, None]  # [B, N - 1, 1]
    drafted = q[:, :-1].gather(2, index).squeeze(2)  # [B, N - 1]
    ratio = torch.where(drafted > 0, p[:, :-1].gather(2, index).squeeze(2) / drafted, 0)
    p_paths = [torch.ones_like(p[:, 0, 0])]  # [B] each
    for i in range(1, tokens.shape[1]):
        p_paths.append(torch.where(real[:, i], (p_paths[-1] * ratio[:, i - 1]).clamp(max=1), 0))
    p_path = torch.stack(p_paths, dim=1)  # [B, N]
    mass = (p_path[..., None] * p - q).clamp_(min=0).sum(dim=2)  # [B, N]
    total = mass + (1 - p_path)
    threshold = torch.where(total > 0, mass / total, 1)  # 0 / 0 where p = q and p_path is 1
    return torch.where(depth == sizes[:, None] - 1, p_path, torch.where(real, threshold, 0)), p_path


def bonus_weights(accepted: Tensor, sizes: Tensor, p_path: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """The bonus token's probabilities [B, V], unnormalised: p after a row's last node, else (p_i p - q)+."""
    index = accepted[:, None, None].expand(-1, 1, p.shape[2])  # [B, 1, V]
    p_after, q_after = p.gather(1, index).squeeze(1), q.gather(1, index).squeeze(1)
    excess = (p_path.gather(1, accepted[:, None]) * p_after - q_after).clamp(min=0)
    whole = (accepted == sizes - 1)[:, None] | (excess.sum(dim=1, keepdim=True) <= 0)  # the second only by rounding
    return torch.where(whole, p_after, excess)


RULES: dict[str, RowRule] = {"traversal": accept_by_traversal, "rrsw": rrsw, "block": block}
