"""What a kind of device can do. It is decided once, when a target is loaded; no other file asks for a device's type.

`Backend` describes any device. A folder `decode/TYPE` with a `backend.py` describes devices of that type better. It is
found by its name, so that the core imports none, and another kind of device takes another folder alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from decode.devices.graph import GraphPool


class Backend:
    """A device, used in the ways that any one allows.

    waits: reading a tensor makes the host wait for all that was launched before. pins: copies from and to pinned memory
    go on while the host does. pass_tokens: of all rows, in a pass that reads prompts; fewer would not keep the device
    busy. fixed_costs: the sizes and seconds of a cost curve for runs that measure none. default_dtype: of models.
    """

    waits = True
    pins = False
    pass_tokens = 8192
    fixed_costs: tuple[Sequence[float], Sequence[float]] = (1, 64, 256, 512), (1.0, 1.1, 1.4, 2.4)
    default_dtype: str | torch.dtype = "auto"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str | None:
        """What tells devices of this kind apart by speed; None if nothing does."""
        return None

    @property
    def is_fast_in_bfloat16(self) -> bool:
        """Whether it has instructions for bfloat16."""
        return False

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        torch.get_device_module(self.device).synchronize(self.device)

    def make_zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory for a KV cache."""
        return like.new_zeros(*shape)

    def make_pool(self) -> GraphPool | None:
        """What graphs share that are never replayed at the same time; None if the device has no graphs."""
        return None


@cache
def find_backend(device: torch.device) -> Backend:
    """What a device can do."""
    if find_spec(f"decode.{device.type}") is None:
        return Backend(device)
    backend: Backend = import_module(f"decode.{device.type}.backend").BACKEND(device)
    return backend
