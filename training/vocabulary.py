"""The tokens that a head drafts with, where they are not all of the target's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from training.data import Example


def choose_tokens(examples: Sequence[Example], vocab_size: int, size: int) -> tuple[Tensor, float]:
    """The `size` tokens most frequent in answers, ascending, and the share of the answers' tokens that they are.

    As EAGLE-3 chooses its draft vocabulary; ties and what never occurred go to the lower id.
    """
    counts: Counter[int] = Counter()
    for example in examples:
        for begin, end in example.spans:
            counts.update(example.tokens[begin:end])
    chosen = sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:size]
    covered = sum(counts[token] for token in chosen) / max(1, counts.total())
    return torch.tensor(sorted(chosen)), covered
