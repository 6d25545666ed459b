"""Acceptance rules for one sampled chain: the one in use, and simple ones to compare it with."""

from __future__ import annotations

import torch

from decode.trees.rejection import weigh_chains
from tests.support.enumeration import Chain, Randomness, RowRule


def in_use(chain: Chain, randomness: Randomness) -> tuple[int, int]:
    """What `decode.trees.rejection` computes, with its decisions left to `randomness`."""
    tokens = torch.tensor([chain.tokens])
    q, p = torch.stack(chain.q)[None], torch.stack(chain.p)[None]
    accept, weights = weigh_chains(tokens, torch.ones_like(tokens, dtype=torch.bool), q, p)
    last = len(chain.tokens) - 1
    while last and not (accept[0, last] > 0 and randomness.accept(float(accept[0, last]))):
        last -= 1
    return last, randomness.draw(weights[0, last])


def leviathan(chain: Chain, randomness: Randomness) -> tuple[int, int]:
    """Token by token (Leviathan et al. 2023, algorithm 1)."""
    for node, token in enumerate(chain.tokens[1:]):
        p, q = chain.p[node], chain.q[node]
        if not randomness.accept(min(1.0, float(p[token] / q[token]))):
            rest = (p - q).clamp(min=0)
            return node, randomness.draw(rest if rest.sum() > 0 else p)
    return len(chain.tokens) - 1, randomness.draw(chain.p[-1])


def block(chain: Chain, randomness: Randomness) -> tuple[int, int]:
    """Block verification (Sun et al., ICLR 2025, algorithm 2), from the last node up."""
    last, p_path = len(chain.tokens) - 1, [1.0]
    for p, q, token in zip(chain.p, chain.q, chain.tokens[1:], strict=False):
        p_path.append(min(1.0, p_path[-1] * float(p[token] / q[token])) if q[token] > 0 else 0.0)
    for node in range(last, -1, -1):
        excess = chain.p[node] if node == last else (p_path[node] * chain.p[node] - chain.q[node]).clamp(min=0)
        mass, rest = float(excess.sum()), 1 - p_path[node]
        accepts = p_path[node] if node == last else mass / (mass + rest) if mass + rest > 0 else 1.0
        if node == 0 or randomness.accept(accepts):
            return node, randomness.draw(excess if mass > 0 else chain.p[node])
    raise AssertionError("the root is accepted")


RULES: dict[str, RowRule] = {"in use": in_use, "leviathan": leviathan, "block": block}
