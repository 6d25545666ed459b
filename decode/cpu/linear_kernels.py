"""Linear layers with compiled kernels for a few tokens.

For one token, oneDNN's packed layers read weights at about half of the memory's bandwidth. A compiled loop of products
and sums reads them at nearly all of it. Each further token makes the loop slower, but hardly a packed layer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from decode.cpu.kernel_cache import Kernel, obtain_kernels
from decode.cpu.kernel_source import KernelSource
from decode.cpu.packed_linear import PackedLinear, can_pack, make_linear

MAX_LAYER_TOKENS = 8  # in a pass through compiled decoder layers; for more the packed layers are as fast
MAX_LINEAR_TOKENS = 3  # for a linear layer alone, whose kernel saves no other calls
LINEAR_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # error, as a share of the largest output


class CompiledLinear(nn.Module):
    """A linear layer with kernels for up to `MAX_LINEAR_TOKENS` tokens and a packed layer for all other calls.

    The packed layer also serves if the kernels are missing or wrong, and while gradients are enabled.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.dense, self.fallback = make_linear(linear.weight, linear.bias, LoopLinear), PackedLinear(linear)
        self._tensors = [*self.dense.parameters()]
        self.kernels: list[Kernel] = []  # for one row, two rows and so on
        self.eval()
        if all(tensor.is_contiguous() for tensor in self._tensors) and min(linear.weight.shape) > 1:
            found = obtain_kernels(linear_sources(linear.weight.dtype, linear.bias is not None))
            kernels = [kernel for kernel in found if not isinstance(kernel, str)]
            if len(kernels) == len(found) and self._are_correct(kernels):
                self.kernels = kernels

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.numel() // inputs.shape[-1]
        wrong_dtype = inputs.dtype != self.dense.weight.dtype
        if not 0 < rows <= len(self.kernels) or torch.is_grad_enabled() or wrong_dtype:
            return self.fallback(inputs)
        (outputs,) = self.kernels[rows - 1]([inputs.reshape(rows, -1).contiguous(), *self._tensors])
        return outputs.view(*inputs.shape[:-1], -1)

    @torch.no_grad()
    def _are_correct(self, kernels: Sequence[Kernel]) -> bool:
        """Whether the kernels compute the same as the packed layer."""
        weight = self.dense.weight
        inputs = torch.randn(len(kernels), weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        expected = self.fallback(inputs)
        for rows, kernel in enumerate(kernels, start=1):
            try:
                (output,) = kernel([inputs[:rows], *self._tensors])
            except RuntimeError:
                return False
            error, largest = (float(values.abs().max()) for values in (output - expected[:rows], expected[:rows]))
            if not error <= LINEAR_TOLERANCE[weight.dtype] * largest:  # also if it is NaN
                return False
        return True


class LoopLinear(nn.Linear):
    """`nn.Linear` computed by `loop_linear`."""

    def forward(self, inputs: Tensor) -> Tensor:
        return loop_linear(inputs, self.weight, self.bias)


def loop_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` as products and sums, which Inductor compiles to one loop over the weight."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    if rows.shape[0] > MAX_LAYER_TOKENS:  # latent attention has layers that see all tokens of the KV cache
        return nn.functional.linear(inputs, weight, bias)
    outputs = torch.stack([(weight * row).sum(-1) for row in rows.unbind()])
    return (outputs if bias is None else outputs + bias).view(*inputs.shape[:-1], -1)


def linear_sources(dtype: torch.dtype, bias: bool) -> list[KernelSource]:
    """Kernels for one to `MAX_LINEAR_TOKENS` rows. They serve linear layers of any size."""
    tensors = [torch.empty(8, 16, dtype=dtype), torch.empty(8, dtype=dtype)][: 1 + bias]
    dynamic = [(1,), (0, 1), (0,)][: 2 + bias]
    examples = [[torch.empty(rows, 16, dtype=dtype), *tensors] for rows in range(1, MAX_LINEAR_TOKENS + 1)]
    return [KernelSource("linear", lambda inputs: [loop_linear(*inputs)], some, dynamic) for some in examples]


def copy_with_loops(module: nn.Module) -> nn.Module:
    """A copy whose linear layers are `LoopLinear`. It shares the module's tensors."""
    if can_pack(module):
        return make_linear(module.weight, module.bias, LoopLinear)
    copied = copy.copy(module)
    children = module._modules.items()
    copied._modules = {name: None if child is None else copy_with_loops(child) for name, child in children}
    return copied
