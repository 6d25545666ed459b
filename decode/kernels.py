"""Linear layers for a single token, as kernels that torch.compile makes with the machine's C++ compiler.

Plain decoding reads every weight for one product with it. oneDNN's packed layers do that at about half of the memory's
speed, a sum of products that torch.compile makes a loop of at most of it. With four tokens nothing is gained any more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from decode.packed import PackedLinear, can_pack, make_linear

KINDS = 256  # of layers, by their shapes; torch.compile would stop at 8
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest number that a layer computes


class OneOrMany(nn.Module):
    """A linear layer in two forms: `one` is compiled and serves a single token, `many` is packed and serves more.

    Raises ValueError where there is no C++ compiler, or its kernel computes something else.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.one, self.many = SumOfProducts(linear), PackedLinear(linear)
        self.eval()
        self._try()

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.numel() != inputs.shape[-1]:
            return self.many(inputs)
        outputs = self._multiply(inputs.reshape(1, 1, -1))  # a kernel is for one shape
        return outputs.view(*inputs.shape[:-1], -1)

    def _multiply(self, inputs: Tensor) -> Tensor:
        return run_compiled(sum_products, inputs, self.one.weight, self.one.bias)

    @torch.inference_mode()  # as the loop has it: kernels are made for a mode
    def _try(self) -> None:
        """Compile now rather than amid an answer, and compare."""
        weight = self.one.weight
        inputs = torch.randn(1, 1, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        try:
            with new_kind():
                found = self._multiply(inputs)
        except Exception as error:  # whatever torch.compile or the machine's compiler makes of it
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ValueError(
                f"torch.compile cannot make kernels here ({type(error).__name__}: {reason}); it needs a C++ compiler "
                "such as g++ and Python's headers, or go on without compiling"
            ) from error
        share = difference(found, self.many(inputs))
        if not share <= TOLERANCE[weight.dtype]:
            raise ValueError(
                f"a compiled layer's result is off by {share:.1e} of its largest number; go on without compiling"
            )


class SumOfProducts(nn.Module):
    """`nn.Linear` for a single token."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        frozen = make_linear(linear.weight, linear.bias)
        self.weight, self.bias = frozen.weight, frozen.bias
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return sum_products(inputs, self.weight, self.bias)


def for_one(module: nn.Module) -> nn.Module:
    """A copy for single tokens that shares the module's tensors."""
    if can_pack(module):
        return SumOfProducts(module)
    single = copy.copy(module)
    single._modules = {name: child if child is None else for_one(child) for name, child in module._modules.items()}
    return single


def sum_products(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, written so that torch.compile makes one loop over the weight of it."""
    if not torch.compiler.is_compiling():  # another mode than the loop's may meet torch.compile's limit
        return nn.functional.linear(inputs, weight, bias)
    outputs = (weight * inputs.flatten()).sum(-1)
    return (outputs if bias is None else outputs + bias).view(*inputs.shape[:-1], -1)


def run_compiled(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function by its kernels, of which there is one for every kind of layer that it is given."""
    return _compile(function)(*args)


@cache  # not when this file is imported: torch.compile takes a second for its own imports
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # The number of threads is asked for at each call: kernels are kept on disk, other processes may have other numbers.
    return torch.compile(function, dynamic=False, options={"cpp.dynamic_threads": True})


@contextmanager
def new_kind() -> Iterator[None]:
    """Where a kind of layer is met for the first time: compile it whole, or raise what torch.compile says."""
    with (
        torch._dynamo.config.patch(recompile_limit=KINDS, fail_on_recompile_limit_hit=True),
        torch._dynamo.error_on_graph_break(True),
    ):
        yield


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors, as a share of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
