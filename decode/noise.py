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
TINY = 1e-300
_MASK = (1 << 64) - 1


def uniform(seed: int, row: int, position: int, stream: int = TEXT, number: int = 0) -> float:
    """A number in [0, 1) keyed by all its arguments."""
    return key(seed, row, position, stream, number) * 2.0**-53


def key(seed: int, row: int, position: int, stream: int = TEXT, number: int = 0) -> int:
    """53 bits made of all the arguments: SplitMix64's finaliser (Steele et al. 2014) over each in turn."""
    state = 0
    for part in (seed, row, position, stream, number):
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 11


def keys(table: Sequence[Sequence[tuple[int, ...]]], device: torch.device) -> Tensor:
    """`key` for a table of arguments, long on a device that is not made to wait for it."""
    filled = torch.tensor([[key(*arguments) for arguments in row] for row in table])
    return filled.to(device, non_blocking=device.type == "cuda")


def uniforms(table: Sequence[Sequence[tuple[int, ...]]], device: torch.device) -> Tensor:
    """`uniform` for a table of arguments, float64."""
    return keys(table, device).double() * 2.0**-53


def stream_uniforms(seeds: Tensor, numbers: Tensor) -> Tensor:
    """Of what SplitMix64 makes of each seed, the `numbers` [n]: float64 [B, n] in [0, 1).

    seeds [B] long. `uniform` for each would take longer than the forward pass.
    """
    state = seeds[:, None] + (numbers + 1) * (0x9E3779B97F4A7C15 - (1 << 64))  # int64 wraps as the paper's uint64 does
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1)):
        state = state.bitwise_xor_(_shift(state, shift)).mul_(factor)
    return _shift(state, 11).double().mul_(2.0**-53)


def _shift(state: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in: an int64's own shift would repeat its sign."""
    return (state >> by).bitwise_and_((1 << 64 - by) - 1)


def gumbel_max(weights: Tensor, seeds: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Draw from laws by letting all tokens run: the first to arrive wins (Gumbel-max; Maddison et al. 2014).

    weights [B, V] as for `invert`, float64; seeds [B] long; tokens [V]: which they are of, None for 0, 1, ... Returns
    the winners' places [B]. Each token has its own noise, whatever others there are, so that laws which differ by as
    little as rounding all but always give the same token. (An inverted distribution function would not: at each of a
    large vocabulary's many borders there is room for another one.)
    """
    tokens = torch.arange(weights.shape[1], device=weights.device) if tokens is None else tokens
    times = stream_uniforms(seeds, tokens).neg_().log1p_().neg_().add_(TINY)  # exponential with rate 1; never 0
    return torch.div(weights, times, out=times).argmax(dim=1)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
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
            inverse_cdf(weights[None], torch.tensor([next(self._uniforms)], dtype=torch.float64).to(weights.device))[0]
        )
