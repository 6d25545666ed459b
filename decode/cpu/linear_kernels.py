"""Linear layers for a few tokens, as kernels compiled with the machine's C++ compiler.

Plain decoding reads every weight for one product with it. oneDNN's packed layers read them at about half of the
memory's speed; a loop of sums of products, at nearly all of it. With each further token the loop takes longer, a packed
layer hardly so.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from decode.cpu.kernel_cache import Kernel, Recipe, obtain_kernels
from decode.cpu.packed_linear import PackedLinear, can_pack, make_linear

FEW = 8  # tokens of a decoder layer; for more the packed layers are as fast
FEW_ALONE = 3  # of a linear layer by itself, which saves no other calls
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest number that a layer computes


class FewOrMany(nn.Module):
    """A linear layer in two forms: `few`, compiled, serves up to `FEW_ALONE` tokens, and `many`, packed, more.

    `many` serves all where the kernels are missing or compute something else, and where gradients are wanted.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.few, self.many = SumsOfProducts(linear), PackedLinear(linear)
        self.kernels: list[Kernel] = []  # for one row and more
        self.eval()
        tensors = self.few.tensors()
        if all(tensor.is_contiguous() for tensor in tensors) and min(linear.weight.shape) > 1:
            found = obtain_kernels(linear_recipes(linear.weight.dtype, linear.bias is not None))
            kernels = [kernel for kernel in found if not isinstance(kernel, str)]
            if len(kernels) == len(found) and self._agree(kernels):
                self.kernels = kernels

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.numel() // inputs.shape[-1]
        if not 0 < rows <= len(self.kernels) or not may_run() or inputs.dtype != self.few.weight.dtype:
            return self.many(inputs)
        (outputs,) = self.kernels[rows - 1]([inputs.reshape(rows, -1).contiguous(), *self.few.tensors()])
        return outputs.view(*inputs.shape[:-1], -1)

    @torch.no_grad()
    def _agree(self, kernels: Sequence[Kernel]) -> bool:
        """Whether the kernels compute what the packed layer does."""
        weight = self.few.weight
        inputs = torch.randn(len(kernels), weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        expected = self.many(inputs)
        try:
            found = [kernel([inputs[:rows], *self.few.tensors()])[0] for rows, kernel in enumerate(kernels, start=1)]
        except RuntimeError:  # of a kernel
            return False
        return all(difference(some, expected[: len(some)]) <= TOLERANCE[weight.dtype] for some in found)


class SumsOfProducts(nn.Module):
    """`nn.Linear` for a few tokens."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        frozen = make_linear(linear.weight, linear.bias)
        self.weight, self.bias = frozen.weight, frozen.bias
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return sum_products(inputs, *self.tensors())

    def tensors(self) -> list[Tensor]:
        """The weight, and the bias where there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def linear_recipes(dtype: torch.dtype, bias: bool) -> list[Recipe]:
    """Kernels for one to `FEW_ALONE` rows, for linear layers of any size."""
    tensors = [torch.empty(8, 16, dtype=dtype), *([torch.empty(8, dtype=dtype)] if bias else [])]
    free = [(1,), (0, 1), *([(0,)] if bias else [])]
    examples = [[torch.empty(rows, 16, dtype=dtype), *tensors] for rows in range(1, FEW_ALONE + 1)]
    return [Recipe(("linear",), lambda inputs: [sum_products(*inputs)], some, free) for some in examples]


def for_few(module: nn.Module) -> nn.Module:
    """A copy for a few tokens that shares the module's tensors."""
    if can_pack(module):
        return SumsOfProducts(module)
    copied = copy.copy(module)
    copied._modules = {name: child if child is None else for_few(child) for name, child in module._modules.items()}
    return copied


def sum_products(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, written so that one loop over the weight is made of it."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    if rows.shape[0] > FEW:  # latent attention has layers that see all tokens of the KV cache
        return nn.functional.linear(inputs, weight, bias)
    outputs = torch.stack([(weight * row).sum(-1) for row in rows.unbind()])
    return (outputs if bias is None else outputs + bias).view(*inputs.shape[:-1], -1)


def may_run() -> bool:
    """Whether kernels, which know no gradients, can take a layer's place as torch is now."""
    return not torch.is_grad_enabled()


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors, as a share of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
