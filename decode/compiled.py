"""Kernels from torch.compile for passes over a single token, on a CPU with a C++ compiler.

Plain decoding reads every weight for one product with it. oneDNN's packed layers do that at about half of the memory's
speed, a sum of products that torch.compile makes a loop of at most of it. With four tokens nothing is gained any more.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from decode.packed import PackedLinear, can_pack, make_linear, pack_layers

Kernel = Callable[..., Tensor]
KINDS = 256  # of layers, by their shapes; torch.compile would stop at 8
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest number that a layer computes


def compile_layers(model: nn.Module) -> None:
    """Pack all linear layers within a model, in place, and compile them for a single token beside it.

    Raises ValueError where there is nothing to compile, no C++ compiler, or a kernel computes something else.
    """
    compiled: list[OneOrMany] = []

    def make(one: nn.Module, many: nn.Module) -> OneOrMany:
        compiled.append(OneOrMany(one, many))
        return compiled[-1]

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_block(child):
                single = for_one(child)
                pack_layers(child)
                setattr(parent, name, make(single, child))
    pack_layers(model, lambda linear: make(for_one(linear), PackedLinear(linear)))
    if not compiled:
        raise ValueError("nothing to compile: only linear layers on a CPU (--device cpu), in float32 or bfloat16, are")
    for layer in compiled:
        _try(layer)


class OneOrMany(nn.Module):
    """A layer in two forms: `one` is compiled and serves a single token, `many` is packed and serves more."""

    def __init__(self, one: nn.Module, many: nn.Module) -> None:
        super().__init__()
        self.one, self.many = one, many
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.numel() != inputs.shape[-1]:
            return self.many(inputs)
        outputs = run_compiled(self.one, inputs.reshape(1, 1, -1))  # a kernel is for one shape
        return outputs.view(*inputs.shape[:-1], -1)


class SumOfProducts(nn.Module):
    """`nn.Linear` for a single token."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        frozen = make_linear(linear.weight, linear.bias)
        self.weight, self.bias = frozen.weight, frozen.bias

    def forward(self, inputs: Tensor) -> Tensor:
        return _sum_products(inputs, self.weight, self.bias)


def for_one(module: nn.Module) -> nn.Module:
    """A copy for single tokens that shares the module's tensors."""
    if isinstance(module, nn.Linear):
        return SumOfProducts(module)
    single = copy.copy(module)
    single._modules = {name: child if child is None else for_one(child) for name, child in module._modules.items()}
    return single


def _is_block(module: nn.Module) -> bool:
    """Whether all weights are those of two or three linear layers, and one tensor is all it is given: an MLP.

    Not one with hooks or another `forward` than its class's: a kernel is shared by all blocks alike.
    """
    if any("forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
        return False
    inside = [part for part in module.modules() if any(True for _ in part.parameters(recurse=False))]
    arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
    fed_with_one = [argument.kind for argument in arguments] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return fed_with_one and 1 < len(inside) < 4 and all(map(can_pack, inside))


def run_compiled(layer: nn.Module, inputs: Tensor) -> Tensor:
    """A layer made by `for_one`, compiled when first run. Tensors are quicker to look over than a module each time."""
    linear, block = _make_kernels()
    return linear(inputs, layer.weight, layer.bias) if isinstance(layer, SumOfProducts) else block(layer, inputs)


@cache  # not when this file is imported: torch.compile takes a second for its own imports
def _make_kernels() -> tuple[Kernel, Kernel]:
    """What runs linear layers, and what runs blocks; each holds a kernel for every kind of layer that it was given."""
    # The number of threads is asked for at each call: kernels are kept on disk, other processes may have other numbers.
    options: dict[str, Any] = {"cpp.dynamic_threads": True}
    linear, block = (torch.compile(function, dynamic=False, options=options) for function in (_sum_products, _call))
    return linear, block


def _sum_products(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, written so that torch.compile makes one loop over the weight of it."""
    if not torch.compiler.is_compiling():  # another mode than the loop's may meet torch.compile's limit
        return nn.functional.linear(inputs, weight, bias)
    outputs = (weight * inputs.flatten()).sum(-1)
    return (outputs if bias is None else outputs + bias).view(*inputs.shape[:-1], -1)


def _call(layer: nn.Module, inputs: Tensor) -> Tensor:
    return layer(inputs)


@torch.inference_mode()  # as the loop has it: kernels are made for a mode
def _try(layer: OneOrMany) -> None:
    """Compile a layer now rather than amid an answer, and hold it to its packed form."""
    weight = next(part.weight for part in layer.one.modules() if isinstance(part, SumOfProducts))
    inputs = torch.randn(1, 1, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    try:
        with torch._dynamo.config.patch(recompile_limit=KINDS, fail_on_recompile_limit_hit=True):
            found = run_compiled(layer.one, inputs)
        expected = layer.many(inputs)
        share = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    except Exception as error:  # whatever torch.compile or the machine's compiler makes of it
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"torch.compile cannot make kernels here ({type(error).__name__}: {reason}); it needs a C++ compiler such "
            "as g++ and Python's headers, or go on without compiling"
        ) from error
    if not share <= TOLERANCE[weight.dtype]:
        raise ValueError(
            f"a compiled layer's result is off by {share:.1e} of its largest number; go on without compiling"
        )
