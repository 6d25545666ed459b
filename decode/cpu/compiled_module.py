"""Modules that are functions of tensors alone, compiled: without Python and small operators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from decode.cpu.build_cache import build_once
from decode.cpu.compiled_layers import LAYER_TOLERANCE
from decode.cpu.layer_kernel import (
    compile_function,
    digest_module,
    example_weights,
    layer_tensors,
    load_kernel,
    name_function,
)
from decode.devices.user_cache import print_notice_once

Compiled: TypeAlias = Callable[..., Tensor]
STORED = 2  # inputs, the last ones, that a module writes to


def compile_module(
    module: nn.Module, example: Sequence[Tensor], dimensions: Sequence[Sequence[Any]]
) -> Compiled | None:
    """The module as a kernel that takes tensors and returns one. None if that cannot be compiled, or is not correct.

    example: what it takes. It writes to the last two. dimensions: each dimension's symbol, or its size if it is fixed.
    """
    tensors, package = layer_tensors(module), type(module).__module__.rpartition(".")[0]
    weights = [*tensors.values()]

    def compute(inputs: list[Tensor]) -> list[Tensor]:
        values = dict(zip(tensors, inputs, strict=False))
        return [functional_call(module, values, tuple(inputs[len(tensors) :]), tie_weights=False)]

    def build(into: Any) -> None:
        print_notice_once(
            "compiling a head", "compiling a kernel for heads of this kind, once; it takes some 20 seconds"
        )
        with torch.inference_mode(False):
            inputs = [*example_weights(tensors), *map(torch.empty_like, example)]
            compile_function(compute, inputs, tensors, dimensions, into)

    def run(*inputs: Tensor) -> Tensor:
        given = [each if each.is_contiguous() else each.contiguous() for each in inputs[:-STORED]]
        return kernel(weights, given, [*inputs[-STORED:]])[0]

    code = [digest_module(name) for name in sorted(sys.modules) if name.startswith(f"{package}.")]
    try:
        kernel = load_kernel(build_once(f"{name_function(module, code, dimensions)}.so", build))
        found, expected = (_call_with_copies(each, example) for each in (run, module))
    except Exception:  # anything from torch.export, Inductor, the compiler or the disk
        return None
    return run if all(map(_agree, found, expected)) else None


@torch.inference_mode()  # as in the loop
def _call_with_copies(function: Compiled, example: Sequence[Tensor]) -> list[Tensor]:
    """What it returns, and what it writes."""
    inputs = [each.clone() for each in example]
    return [function(*inputs), *inputs[-STORED:]]


def _agree(found: Tensor, expected: Tensor) -> bool:
    allowed = LAYER_TOLERANCE[found.dtype] * expected.float().abs().max()
    return bool((found - expected).float().abs().max() <= allowed)
