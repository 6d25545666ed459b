"""Copies between host and device: a step makes one of each, from and to pinned memory.

A copy from pageable memory makes the host wait, and each copy costs a launch. So what a step needs on the device is
collected and copied as one piece.

Shapes: B rows, T committed tokens (padded to the longest row).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decode.devices.backend import find_backend

ALIGNMENT = 8  # bytes; of every tensor in a packed copy


class Upload:
    """Tensors that a step needs on the device, by name. The first one that is read copies all added so far at once.

    Where the host reads the device's memory, nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._waiting: dict[str, Tensor] = {}
        self._there: dict[str, Tensor] = {}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add CPU tensors."""
        (self._waiting if find_backend(self.device).waits else self._there).update(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._there or name in self._waiting

    def __getitem__(self, name: str) -> Tensor:
        """A tensor on the device. Raises KeyError if none of that name was added."""
        if name in self._waiting:
            self._there.update(copy_packed(self._waiting, self.device))
            self._waiting = {}
        return self._there[name]


def copy_packed(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """CPU tensors on another device, by one copy. On a GPU the host does not wait for it.

    The results are views of one piece of memory, which lives as long as any of them.
    """
    if not (backend := find_backend(device)).waits:
        return dict(tensors)
    starts, end = [], 0
    for tensor in tensors.values():
        starts.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(end, dtype=torch.uint8, pin_memory=backend.pins)
    for start, tensor in zip(starts, tensors.values(), strict=True):
        packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    there = packed.to(device, non_blocking=True)
    return {
        name: there[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, (name, tensor) in zip(starts, tensors.items(), strict=True)
    }


def waits(tensor: Tensor) -> bool:
    """Whether reading a tensor makes the host wait: all do that are not in its own memory."""
    return not tensor.is_cpu


def read(tensor: Tensor) -> Tensor:
    """The tensor on the CPU. On a GPU this waits for everything before it."""
    if not find_backend(tensor.device).pins:
        return tensor.cpu()
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    there.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return there


def list_numbers(
    committed: Sequence[Sequence[int]], bonus: Sequence[int], path: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """A step as tensors, for proposers that draft on the device.

    counts [B]: committed tokens. following [B, T]: the token after each committed one, path [B, T]: its node in the
    verified tree; both are padded with 0.
    """
    following = [[*tokens[1:], root] for tokens, root in zip(committed, bonus, strict=True)]
    return {"counts": torch.tensor([*map(len, committed)]), "following": _pad(following), "path": _pad(path)}


def _pad(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
