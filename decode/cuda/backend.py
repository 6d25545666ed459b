"""What a CUDA device can do: graphs, and attention to long texts without a mask."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from decode.cuda.fixed_steps import find_graph_fault, open_steps
from decode.cuda.graph import CudaGraphPool
from decode.devices.attention import ATTENTION, HALVES
from decode.devices.backend import Backend
from decode.models.facts import has_hooks
from decode.weights.layers import merge_layers

LONG = 2048  # committed tokens from which two kernels are faster than one with a mask (docs/gpu.md)
SLOTS = 64  # texts are seen whole in multiples of this: kernels with masks want aligned ones
STRIDE = 1024  # the same for graphs: capturing one takes as long as a few steps
LARGEST_HEAD, MULTIPLE = 256, 8  # head sizes of flash attention
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CudaBackend(Backend):
    """How models are accelerated: every mode but "off" changes attention alone. "graphs" also makes steps CUDA graphs,
    and so does "auto" for models that allow it.
    """

    pins = True
    attention = ATTENTION
    lacks = ("compiled",)
    find_graph_fault, open_steps = staticmethod(find_graph_fault), staticmethod(open_steps)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def is_fast_in_bfloat16(self) -> bool:
        return torch.cuda.is_bf16_supported(including_emulation=False)

    def make_pool(self) -> CudaGraphPool:
        return CudaGraphPool(self.device)

    def accelerate(self, model: Any, mode: str) -> None:
        if mode == "graphs" and has_hooks(model):
            raise ValueError("a model that accelerate spreads over devices cannot have CUDA graphs; choose auto")
        super().accelerate(model, mode)

    def pack_drafter(self, module: nn.Module) -> None:
        merge_layers(module, lambda layer: type(layer) is nn.Linear)

    def running(self) -> AbstractContextManager[None]:
        """By torch's own attention kernels but cuDNN's.

        cuDNN makes a plan for each new shape, and nearly every draft tree has one: 43 ms each on an H200, where the
        other kernels take 0.1.
        """
        return sdpa_kernel(KERNELS)

    def sees_texts_whole(self, dtype: torch.dtype, size: int) -> bool:
        """Where flash attention is."""
        return dtype in HALVES and size % MULTIPLE == 0 and size <= LARGEST_HEAD

    def count_seen(self, lengths: Sequence[int]) -> int:
        return _count_seen(lengths, SLOTS)

    def find_window(self, lengths: Sequence[int], capacity: int, more: int) -> tuple[int, int]:
        if not (seen := _count_seen(lengths, STRIDE)):
            return 0, capacity
        return seen, min(capacity, -(-(max(lengths) + more) // STRIDE) * STRIDE)


BACKEND = CudaBackend


def _count_seen(lengths: Sequence[int], multiple: int) -> int:
    seen = min(lengths) // multiple * multiple
    return seen if seen >= LONG else 0
