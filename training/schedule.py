"""The order of training: how long it runs, and which examples form the batches of each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch


@dataclass(frozen=True)
class Schedule:
    """Length and speed of training. `patience`: validations without a better tau before training stops early."""

    epochs: int = 1
    max_steps: int | None = None
    batch_tokens: int = 2048
    lr: float = 1e-3
    seed: int = 0
    save_every: int = 200
    validate_every: int = 200
    patience: int = 10

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """The batch of each step, as example numbers. lengths: the number of tokens in each example."""
        epochs = (plan_batches(lengths, self.batch_tokens, self.seed, epoch) for epoch in range(self.epochs))
        return [*islice(chain.from_iterable(epochs), self.max_steps)]


def plan_batches(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch as lists of example numbers; every example occurs once.

    A batch is a rectangle [B, T] of at most `batch_tokens` tokens; a longer example gets a batch of its own. Examples
    are shuffled, then sorted by length within pools of about 64 batches: padding stays at a few per cent.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    pool = max(1, 64 * batch_tokens * len(lengths) // max(1, sum(lengths)))
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
