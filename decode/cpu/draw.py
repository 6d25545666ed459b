"""Sampling the target's tokens after one node of each row.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.noise import gumbel_max
from decode.sampling import NO_TOKEN, Sampling


def draw(
    logits: Tensor, sampling: Sampling, prefixes: Sequence[Tensor | None], request_ids: Sequence[int], seeds: Tensor
) -> Tensor:
    """Sample a token [B] per row from logits [B, V], by `Sampling.probabilities` and the noise of seeds [B].

    NO_TOKEN where the logits are NaN or infinite. On a CPU row by row: probabilities and noise of all rows in float64
    exceed its caches.
    """
    if logits.device.type != "cpu":
        p = sampling.probabilities(logits, prefixes, request_ids)
        return torch.where(p[:, 0].isnan(), NO_TOKEN, gumbel_max(p, seeds))
    drawn = []
    for row in range(len(logits)):
        one = slice(row, row + 1)
        p = sampling.probabilities(logits[one], prefixes[one], request_ids[one])
        tokens = p[0].nonzero()[:, 0]  # no noise is needed for the others
        token = tokens[gumbel_max(p[:, tokens], seeds[one], tokens)]
        drawn.append(torch.where(p[0, :1].isnan(), NO_TOKEN, token))
    return torch.cat(drawn)
