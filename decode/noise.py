"""Random numbers that depend on what they are for and on nothing else.

The draw at position i of row r under seed s is a function of (s, r, i). Whatever was drafted, in whatever batch, on
whatever device, the same draw meets the same law and gives the same token: that is why text does not depend on the
proposer. Drafts and acceptance tests take other streams of the same source.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

TEXT, ACCEPTANCE, DRAFT = range(3)  # streams: the target's own draws, tests of sampled drafts, the drafts themselves
_MASK = (1 << 64) - 1


def uniform(seed: int, row: int, position: int, stream: int = TEXT, number: int = 0) -> float:
    """A number in [0, 1) keyed by all its arguments: SplitMix64's finaliser (Steele et al. 2014) over each in turn."""
    state = 0
    for key in (seed, row, position, stream, number):
        state = (state + key + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def uniforms(keys: Sequence[Sequence[tuple[int, ...]]], device: torch.device) -> Tensor:
    """`uniform` for a table of keys, float64 on a device that is not made to wait for it."""
    table = torch.tensor([[uniform(*key) for key in row] for row in keys], dtype=torch.float64)
    return table.to(device, non_blocking=device.type == "cuda")


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from laws by inverting their distribution functions.

    weights [B, V], at least 0 and not all 0, need not sum to one; uniforms [B] in [0, 1), float64. Returns tokens [B].
    `torch.multinomial` draws the same law, slower and with noise of its own.
    """
    cumulative = weights.double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    goal = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))  # may round up to it
    return torch.searchsorted(cumulative, goal, right=True)[:, 0]


class KeyedDice:
    """The dice of `decode.rejection`, for one row of one step: the n-th throw is keyed by (seed, row, position, n)."""

    def __init__(self, seed: int, row: int, position: int) -> None:
        self._uniforms = (uniform(seed, row, position, ACCEPTANCE, number) for number in count())

    def accept(self, probability: float) -> bool:
        return next(self._uniforms) < probability

    def draw(self, weights: Tensor) -> int:
        return int(
            invert(weights[None], torch.tensor([next(self._uniforms)], dtype=torch.float64).to(weights.device))[0]
        )
