"""Acceptance rules for one row: those in use, and simple ones to compare them with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from decode.rejection import Randomness, SampledTree, accept_by_traversal, block_thresholds, bonus_weights

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
    """`decode.rejection.accept_by_block` for one chain, decided from the last node up."""
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


RULES: dict[str, RowRule] = {"traversal": accept_by_traversal, "rrsw": rrsw, "block": block}
