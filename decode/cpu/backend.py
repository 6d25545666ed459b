"""What a CPU can do."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from platform import machine

import torch
from torch import Tensor

from decode.devices.backend import Backend

PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # not on Windows


class CpuBackend(Backend):
    waits = False
    pass_tokens = 0  # longer passes are not faster
    fixed_costs = (1, 4, 8, 12, 16, 32, 64), (1.0, 1.0, 1.12, 1.24, 1.58, 2.69, 5.26)  # the default model on two cores
    default_dtype = torch.float32

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def is_fast_in_bfloat16(self) -> bool:
        """On older CPUs with AVX-512, oneDNN only emulates them."""
        if not torch.backends.mkldnn.is_available():
            return False
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.ops.mkldnn._is_mkldnn_bf16_supported() and (native or machine() not in ("x86_64", "AMD64"))

    def make_zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """The system maps a page of memory once it is written to: slots that no text reaches take none."""
        if not prod(shape):
            return like.new_zeros(*shape)
        try:
            memory = mmap.mmap(-1, prod(shape) * like.dtype.itemsize, **PRIVATE)
        except OSError as error:
            raise torch.OutOfMemoryError(f"not enough memory for a KV cache of {shape}: {error}") from error
        with torch.enable_grad():  # see `decode.kv_cache.Block.hold`
            return torch.frombuffer(memory, dtype=like.dtype).view(*shape)


BACKEND = CpuBackend
