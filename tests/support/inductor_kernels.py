"""How many kernels torch.compile makes of a function, by asking inductor. Needs no GPU and no compiler.

The function is traced on the CPU and scheduled by the rules of inductor's Triton backend, which stops before it
generates code. Each group of operations that it fuses counts as one launch, as does each library call (matrix products,
attention, top-k, sorting many numbers). On a GPU, inductor may also split large reductions in two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import config, ir, lowering, scheduler

compile_function = torch.compile  # a simulated device replaces it
CAT = torch.ops.aten.cat.default
lower_cat = lowering.lowerings[CAT]


class _ScheduledError(Exception):
    """Ends a compilation once its kernels are known."""


def list_kernels(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """The names of the kernels for these arguments, which are on the CPU.

    Raises an exception of torch._dynamo if the function cannot be compiled as a whole: if it reads a value on the host
    or makes a shape from one.
    """
    found: list[list[str]] = []
    failures: list[Exception] = []

    def schedule(self: Any, nodes: Any) -> None:
        original(self, nodes)
        found.append([node.get_name() for node in self.nodes if is_launch(node)])
        raise _ScheduledError

    def compile_it() -> None:  # in a thread of its own, where no dispatch mode is active
        torch._dynamo.reset()
        try:
            with torch.inference_mode(), config.patch(cpu_backend="triton"):  # of this thread only
                compile_function(function, fullgraph=True)(*args, **kwargs)
        except Exception as failure:
            failures.append(failure)

    original = scheduler.Scheduler._init
    cat = patch.dict(lowering.lowerings, {CAT: lower_cat_for_gpu})
    with cat, patch.object(scheduler.Scheduler, "_init", schedule):
        thread = Thread(target=compile_it)
        thread.start()
        thread.join()
    if not found and failures:
        raise failures[0]
    return found[0] if found else []


class _SeenOnGpu(ir.TensorBox):
    """A tensor that says once that it is on a GPU."""

    def get_device(self) -> torch.device | None:
        device = super().get_device() if hasattr(self, "asked") else torch.device("cuda")
        self.asked = True
        return device


def lower_cat_for_gpu(inputs: Sequence[ir.TensorBox], dim: int = 0) -> ir.TensorBox:
    """Inductor's lowering of a concatenation, which first asks for the device. On a CPU it fuses none."""
    return lower_cat([_SeenOnGpu(inputs[0].data), *inputs[1:]], dim)


def is_launch(node: Any) -> bool:
    """Whether a scheduled node is a kernel, not a view or one of several results."""
    return not isinstance(node, scheduler.NopKernelSchedulerNode) and not isinstance(node.node, ir.MultiOutput)
