"""What CUDA devices can do."""

from __future__ import annotations

import torch

from decode.cuda.graph import CudaGraphPool
from decode.devices.backend import Backend


class CudaBackend(Backend):
    pins = True
    # An estimate, not timed: while weights are read, there is time for the arithmetic of about 300 tokens.
    fixed_costs = (1, 64, 256, 512), (1.0, 1.1, 1.4, 2.4)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def is_fast_in_bfloat16(self) -> bool:
        return torch.cuda.is_bf16_supported(including_emulation=False)

    def make_pool(self) -> CudaGraphPool:
        return CudaGraphPool(self.device)


BACKEND = CudaBackend
