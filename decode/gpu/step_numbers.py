"""The numbers of a step as tensors, which are copied to the device together.

Shapes: B rows, T committed tokens (padded to the longest row).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Numbers: TypeAlias = dict[str, Tensor]


def list_numbers(committed: Sequence[Sequence[int]], bonus: Sequence[int], path: Sequence[Sequence[int]]) -> Numbers:
    """A step as tensors, for proposers that draft on the device.

    roots [B]: the bonus tokens. counts [B]: committed tokens. following [B, T]: the token after each committed one,
    path [B, T]: its node in the verified tree; both are padded with 0.
    """
    following = [[*tokens[1:], root] for tokens, root in zip(committed, bonus, strict=True)]
    return {
        "roots": torch.tensor(bonus),
        "counts": torch.tensor([*map(len, committed)]),
        "following": _pad(following),
        "path": _pad(path),
    }


def _pad(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
