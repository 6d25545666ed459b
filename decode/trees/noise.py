"""Random numbers keyed by seed, request id and position.

The same token is drawn whatever was drafted, in any batch and on any device, so the text does not depend on the
proposer. Drafts and acceptance tests use other streams of the same source.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from decode.devices.transfer import Upload, copy_packed

TEXT, ACCEPTANCE, DRAFT = range(3)  # streams: the target's tokens, tests of sampled draft tokens, these draft tokens
KEY_NAMES = {TEXT: "text_keys", ACCEPTANCE: "acceptance_keys", DRAFT: "draft_keys"}  # in a step's `Upload`
TINY = 1e-300
Texts: TypeAlias = Mapping[int, Sequence[int]]  # by request id: tokens up to the root, included
Noise: TypeAlias = Upload | dict[str, Tensor]  # may have the keys of streams of noise, by `KEY_NAMES`
_MASK = (1 << 64) - 1
_GAMMA, _FACTOR, _FACTOR2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's constants


def key(seed: Any, request_id: Any, position: Any, stream: int = TEXT, index: Any = 0) -> Any:
    """53 bits keyed by all arguments: SplitMix64's finaliser (Steele et al. 2014) applied to each in turn.

    Arguments are integers, or numpy arrays of uint64 that are broadcast.
    """
    state: Any = 0
    for part in (seed, request_id, position, stream, index):
        state = (state + part + _GAMMA) & _MASK
        state = ((state ^ (state >> 30)) * _FACTOR) & _MASK
        state = ((state ^ (state >> 27)) * _FACTOR2) & _MASK
        state ^= state >> 31
    return state >> 11


def row_keys(
    seeds: int | Sequence[int], request_ids: Sequence[int], positions: Sequence[int], levels: int, stream: int
) -> Tensor:
    """Keys of each row's next `levels` decisions, [B, levels] long, on the CPU. seeds: one for each row, or for all.

    In the stream TEXT decision i is the token at position positions[b] + i, in others it is index i at positions[b].
    """
    seeds = [seeds] * len(request_ids) if isinstance(seeds, int) else seeds
    columns = *([each & _MASK for each in numbers] for numbers in (seeds, request_ids)), positions
    own, ids, places = (np.array(numbers, dtype=np.uint64)[:, None] for numbers in columns)
    steps = np.arange(levels, dtype=np.uint64)
    keyed = key(own, ids, places + steps) if stream == TEXT else key(own, ids, places, stream, steps)
    return torch.from_numpy(keyed.astype(np.int64))


def find_keys(
    stream: int, count: int, seed: int | None, texts: Texts, device: torch.device, noise: Noise | None
) -> Tensor:
    """The keys [B, >= count] of a stream of noise after these texts: what the step has uploaded, or made now."""
    name = KEY_NAMES[stream]
    if noise is not None and name in noise:
        return noise[name]
    made = row_keys(seed or 0, [*texts], [*map(len, texts.values())], count, stream)
    return copy_packed({name: made}, device)[name]


def to_uniforms(made: Tensor) -> Tensor:
    """Keys as numbers in [0, 1), float64."""
    return made.double() * 2.0**-53


def stream_uniforms(seeds: Tensor, indices: Tensor) -> Tensor:
    """Uniforms [B, n] in [0, 1), float64: entries `indices` [n] of each seed's SplitMix64 stream.

    seeds [B] long. Calling `key` for each token would take longer than a forward pass.
    """
    wrap = 1 << 64  # int64 wraps around as uint64 does, but its constants must be in range
    state = seeds[:, None] + (indices + 1) * (_GAMMA - wrap)
    for shift, factor in ((30, _FACTOR - wrap), (27, _FACTOR2 - wrap), (31, 1)):
        state = state.bitwise_xor_(_shift_right(state, shift)).mul_(factor)
    return _shift_right(state, 11).double().mul_(2.0**-53)


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """A logical shift: int64's own shift would copy the sign bit."""
    return (state >> bits).bitwise_and_((1 << 64 - bits) - 1)


def gumbel_max(weights: Tensor, seeds: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Sample one index [B] per row by the Gumbel-max trick (Maddison et al. 2014), here with exponential noise.

    weights [B, V] as for `inverse_cdf`, float64; seeds [B] long; tokens [V]: the token ids of the weights, None for 0,
    1, ... Each token has its own noise, so probabilities that differ only by rounding nearly always give the same
    token. An inverse CDF would not: rounding shifts the boundaries of all tokens after the first.
    """
    tokens = torch.arange(weights.shape[1], device=weights.device) if tokens is None else tokens
    exponential = make_exponential(seeds, tokens)
    return torch.div(weights, exponential, out=exponential).argmax(dim=1)


def make_exponential(seeds: Tensor, tokens: Tensor) -> Tensor:
    """The exponential noise of these tokens [V] under each of the seeds [B], [B, V] float64 and never 0."""
    return stream_uniforms(seeds, tokens).neg_().log1p_().neg_().add_(TINY)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Sample one index [B] per row by the inverse CDF.

    weights [B, V], at least 0 and not all 0, need not sum to one; uniforms [B] in [0, 1), float64.
    """
    cumulative = weights.double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # The product may round up to the total, which no token covers.
    goal = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, goal, right=True)[:, 0]
