"""How long a training goes on, and which examples each of its steps sees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from training.batches import plan_batches


@dataclass(frozen=True)
class Schedule:
    """How long and how fast. `patience`: validations without a better tau before training ends early."""

    epochs: int = 1
    max_steps: int | None = None
    batch_tokens: int = 2048
    accumulate: int = 1
    lr: float = 1e-3
    seed: int = 0
    save_every: int = 200
    validate_every: int = 200
    patience: int = 10

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_tokens", "accumulate", "save_every", "validate_every", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}; it must be at least 1")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed is {self.seed}; it must be between 0 and {(1 << 32) - 1}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr is {self.lr}; it must be a positive number")

    def plan(self, lengths: Sequence[int]) -> Iterator[list[list[int]]]:
        """What each step sees, from the first to the last: `accumulate` batches of examples, fewer at an epoch's end.

        lengths: how many tokens each example has.
        """
        return islice(self._plan_epochs(lengths), self.max_steps)

    def _plan_epochs(self, lengths: Sequence[int]) -> Iterator[list[list[int]]]:
        for epoch in range(self.epochs):
            batches = plan_batches(lengths, self.batch_tokens, self.seed, epoch)
            for begin in range(0, len(batches), self.accumulate):
                yield batches[begin : begin + self.accumulate]
