"""Acceptance rules for one row: those in use, and simple ones to compare them with."""

from __future__ import annotations

from collections.abc import Callable

import torch

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
    """Block verification of one chain of sampled tokens (Sun et al., ICLR 2025, algorithm 2), from the last node up.

    p_i = min(1, p_{i-1} p(X_i) / q(X_i)). With S_i = sum (p_i p - q)+ after it, node i is accepted with probability
    S_i / (S_i + 1 - p_i), the last node with p_i.
    """
    last, p_path = len(tree.tokens) - 1, [1.0]
    for node in range(1, last + 1):
        p, q = tree.p(node - 1)[tree.tokens[node]], tree.q(node - 1)[tree.tokens[node]]
        p_path.append(min(1.0, p_path[-1] * float(p / q)) if q > 0 else 0.0)
    for node in range(last, -1, -1):
        excess = tree.p(node) if node == last else (p_path[node] * tree.p(node) - tree.q(node)).clamp(min=0)
        mass, rest = float(excess.sum()), 1 - p_path[node]
        accepts = p_path[node] if node == last else mass / (mass + rest) if mass + rest > 0 else 1.0
        if node == 0 or randomness.accept(accepts):
            return list(range(node + 1)), randomness.draw(excess if mass > 0 else tree.p(node))
    raise AssertionError("the root is accepted")


RULES: dict[str, RowRule] = {"traversal": accept_by_traversal, "rrsw": rrsw, "block": block}
