"""Which examples make a batch: of like length, so that little is padding, and in an order that a seed fixes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def plan_batches(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Numbers of examples, batch by batch, for one epoch: every example once.

    A batch is a rectangle [B, T] of at most `batch_tokens` places (an example that is longer stands alone). Examples
    are shuffled, then sorted by length within pools of several batches: batches vary, and padding stays below a few
    hundredths.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    pool = max(1, 64 * batch_tokens * len(lengths) // max(1, sum(lengths)))  # examples of about 64 batches
    batches: list[list[int]] = []
    for begin in range(0, len(order), pool):
        batch: list[int] = []
        for number in sorted(order[begin : begin + pool], key=lambda number: lengths[number]):
            if batch and (len(batch) + 1) * lengths[number] > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(number)
        batches.append(batch)
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[index] for index in shuffled]


def padding_share(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """The share of places in the batches that hold no token."""
    places = sum(len(batch) * max(lengths[number] for number in batch) for batch in batches)
    return 1 - sum(lengths[number] for batch in batches for number in batch) / places
