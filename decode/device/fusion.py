"""Fused kernels: all of a step but the model's forward pass, compiled by torch.compile on a GPU.

Each function that is marked with `fused` becomes a few kernels instead of one for every operation. It is compiled when
it is first called, and runs as it is on a CPU, outside `fusing`, and where it cannot be compiled or has too many
variants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from decode.models.user_cache import print_notice

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
VARIANTS = 64  # of a function, for different shapes, heads and levels; torch's own limit of 8 is too low
# Older torch takes no limit: there a function runs as it is from its ninth variant on.
LIMIT: dict[str, Any] = {name: VARIANTS for name in ["recompile_limit"] if name in signature(torch.compile).parameters}
_is_fusing: ContextVar[bool] = ContextVar("is_fusing", default=False)
_failed = False  # in this process: a compiler is missing, for example


@contextmanager
def fusing(wanted: bool) -> Iterator[None]:
    """Run functions marked with `fused` compiled, if `wanted`."""
    token = _is_fusing.set(wanted)
    try:
        yield
    finally:
        _is_fusing.reset(token)


def fused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, compiled for tensors on a GPU while `fusing`."""
    compiled: Callable[Arguments, Result] | None = None

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        nonlocal compiled
        if torch.compiler.is_compiling() or not _is_fusing.get() or _failed or not _is_on_gpu(args):
            return function(*args, **kwargs)
        compiled = compiled or torch.compile(function, fullgraph=True, **LIMIT)
        try:
            return compiled(*args, **kwargs)
        # Both come before anything is computed.
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            compiled = function
        except torch._dynamo.exc.TorchDynamoException as error:
            _give_up(error)
        return function(*args, **kwargs)

    return call


def _is_on_gpu(args: object) -> bool:
    return any(isinstance(each, Tensor) and each.device.type == "cuda" for each in tree_leaves(args))


def _give_up(error: Exception) -> None:
    global _failed
    _failed = True
    print_notice(f"no fused kernels ({str(error).splitlines()[0]}): decoding goes on without them")
