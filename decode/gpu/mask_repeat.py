"""Masks for grouped queries, repeated once a step and not once a layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_REPEATED = WeakTensorKeyDictionary()  # a mask -> the same mask, repeated; forgotten with the mask


def repeat_mask(mask: Tensor, times: int) -> Tensor:
    """A mask [B, 1, N, S] as [B, 1, times x N, S], for queries that are stacked as if they were more nodes."""
    if mask.device.type == "cpu" or torch.compiler.is_compiling():  # without a dictionary
        return mask.repeat(1, 1, times, 1)
    repeated = _REPEATED.get(mask)
    if repeated is None or repeated.shape[2] != times * mask.shape[2]:
        repeated = _REPEATED[mask] = mask.repeat(1, 1, times, 1)
    return repeated
