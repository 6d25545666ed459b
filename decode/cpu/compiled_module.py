"""Modules that are functions of tensors alone, compiled: without Python and small operators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from decode.cpu.compiled_layers import LAYER_TOLERANCE, obtain_kernel
from decode.cpu.layer_kernel import compile_function, digest_module, example_weights, layer_tensors, name_kernel

Compiled: TypeAlias = Callable[..., Tensor]
STORED = 2  # the last inputs, which a module writes to


def compile_module(
    module: nn.Module, example: Sequence[Tensor], dimensions: Sequence[Sequence[int | str]]
) -> Compiled | None:
    """The module as a kernel that takes tensors and returns one. None if that cannot be compiled, or is not correct.

    example: what it takes. It writes to the last two. dimensions: each dimension's symbol, or its size if it is fixed.
    """
    tensors, package = layer_tensors(module), type(module).__module__.rpartition(".")[0]
    weights = [*tensors.values()]
    if any(each.is_floating_point() and each.dtype not in LAYER_TOLERANCE for each in weights):
        return None

    def compute(inputs: list[Tensor]) -> list[Tensor]:
        values = dict(zip(tensors, inputs, strict=False))
        return [functional_call(module, values, tuple(inputs[len(tensors) :]), tie_weights=False)]

    @torch.inference_mode(False)  # see `compile_kernel`
    def compile(into: Path) -> None:
        inputs = [*example_weights(tensors), *map(torch.empty_like, example)]
        compile_function(compute, inputs, tensors, dimensions, into)

    code = [digest_module(name) for name in sorted(sys.modules) if name.startswith(f"{package}.")]
    kernel = obtain_kernel(name_kernel(module, code, dimensions), compile)
    if kernel is None:
        return None

    def run(*inputs: Tensor) -> Tensor:
        given = [each if each.is_contiguous() else each.contiguous() for each in inputs[:-STORED]]
        return kernel(weights, given, [*inputs[-STORED:]])[0]

    try:
        found, expected = (_call_with_copies(each, example) for each in (run, module))
    except RuntimeError:
        return None
    return run if all(map(_agree, found, expected)) else None


@torch.inference_mode()  # as in the loop
def _call_with_copies(function: Compiled, example: Sequence[Tensor]) -> list[Tensor]:
    """What it returns, and what it writes."""
    inputs = [each.clone() for each in example]
    return [function(*inputs), *inputs[-STORED:]]


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Whether each vector's median error is small."""
    error = (found - expected).float().abs().median(dim=-1).values
    size = expected.float().abs().median(dim=-1).values
    return bool((error <= LAYER_TOLERANCE[found.dtype] * size.clamp(min=1e-30)).all())
