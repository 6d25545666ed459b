"""A decoder layer that runs compiled kernels for a few tokens."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.func import functional_call

from decode.cpu.kernel_cache import Kernel
from decode.cpu.kernel_source import KernelSource, describe_module
from decode.cpu.layer_calls import CallSpec, flatten_call, rebuild_call
from decode.cpu.linear_kernels import copy_with_loops

# The largest error of a kernel: a token's median error, as a share of what the layer typically adds to its state.
# A share of the largest state would hide errors: real models have a few huge ones.
LAYER_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


class RecordedCall(NamedTuple):
    """A call of a layer in a pass of the model: the flattened call, the states it got and what it returned."""

    spec: CallSpec
    tensors: list[Tensor]
    states: Tensor
    output: Any


class CompiledLayer:
    """The `forward` of a decoder layer: kernels for calls that were compiled, the packed layer for all others."""

    def __init__(self, layer: nn.Module, number: int) -> None:
        self.number = number  # its layer of the KV cache
        self.tried: dict[tuple[int, int], bool] = {}  # by rows and nodes of a pass: whether there is a correct kernel
        self._kernels: dict[CallSpec, Kernel] = {}
        self._dense = _copy_for_kernel(layer)
        self._tensors = {**dict(self._dense.named_parameters()), **dict(self._dense.named_buffers())}
        self._returns: tuple[bool, ...] | None = None  # which parts of its output are tensors; None: it is no tuple
        self._layer = ref(layer)  # the layer holds this object; a cycle would keep its weights alive
        self._hooks: list[dict[int, Any]] = []

    def replace_forward(self, layer: nn.Module) -> None:
        """Become a layer's forward."""
        layer.forward = self
        parts = [*layer.modules()][1:]  # the layer itself still runs its own hooks
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        may_run = not torch.is_grad_enabled() and not any(self._hooks)
        call = flatten_call(self.number, args, kwargs) if may_run else None
        kernel = None if call is None else self._kernels.get(call[0])
        if call is None or kernel is None:
            layer: Any = self._layer()
            return type(layer).forward(layer, *args, **kwargs)
        tensors = iter(self._run(kernel, call[1]))
        if self._returns is None:
            return next(tensors)
        return tuple(next(tensors) if is_tensor else None for is_tensor in self._returns)

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> RecordedCall | None:
        """A call to compile a kernel for and to check it with; None if a kernel cannot serve such calls."""
        call = flatten_call(self.number, args, kwargs)
        states = args[0] if args else kwargs.get("hidden_states")
        first, *others = _split_output(output)
        plain = isinstance(first, Tensor) and all(part is None or isinstance(part, Tensor) for part in others)
        if call is None or not isinstance(states, Tensor) or not plain:
            return None
        return RecordedCall(*call, states, output)

    def kernel_source(self, call: RecordedCall) -> KernelSource:
        """What the kernel for such calls is compiled from. Sizes S and C may change."""
        dense, names, spec = self._dense, list(self._tensors), call.spec

        def compute(inputs: list[Tensor]) -> list[Tensor]:
            args, kwargs = rebuild_call(spec, inputs[len(names) :])
            output = functional_call(dense, dict(zip(names, inputs, strict=False)), args, kwargs)
            return [part for part in _split_output(output) if part is not None]

        sizes = [(3,) if stride is None else () for _, stride, _ in spec.tensors]
        dynamic = [*[() for _ in names], *sizes, (2,), (2,), ()]
        return KernelSource((describe_module(dense), spec), compute, [*self._tensors.values(), *call.tensors], dynamic)

    def try_kernel(self, kernel: Kernel | str, call: RecordedCall) -> None:
        """Use a kernel from now on if its output for a recorded call is the layer's, up to `LAYER_TOLERANCE`."""
        size, expected = (call.states.shape[0], call.states.shape[1]), _split_output(call.output)[0]
        self.tried[size] = False
        if isinstance(kernel, str):
            return
        try:
            states = self._run(kernel, call.tensors)[0]
        except RuntimeError:
            return
        error, added = ((expected - other).float().abs().median(dim=-1).values for other in (states, call.states))
        if float((error / added.clamp(min=1e-30)).max()) <= LAYER_TOLERANCE.get(expected.dtype, 0.0):
            self.tried[size] = True
            is_tuple = isinstance(call.output, tuple)
            self._returns = tuple(part is not None for part in call.output) if is_tuple else None
            self._kernels[call.spec] = kernel

    def _run(self, kernel: Kernel, inputs: list[Tensor]) -> list[Tensor]:
        return kernel([*self._tensors.values(), *inputs])


def find_cache_layer(layer: nn.Module) -> int | None:
    """The layer of the KV cache that a decoder layer writes to; None if unclear, or if its parts were changed."""
    parts = list(layer.modules())
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts[1:])  # layers share a kernel
    numbers = {vars(part).get("layer_idx") for part in parts} - {None}
    if hooked or any("forward" in vars(part) for part in parts) or len(numbers) != 1:
        return None
    return numbers.pop()


def _copy_for_kernel(layer: nn.Module) -> nn.Module:
    """A copy without what sets most layers apart, its number and its hooks: layers that are alike share kernels."""
    copied = copy_with_loops(layer)
    copied._forward_hooks, copied._forward_pre_hooks = OrderedDict(), OrderedDict()
    for part in copied.modules():
        if vars(part).get("layer_idx") is not None:
            vars(part)["layer_idx"] = 0
    return copied


def _split_output(output: Any) -> tuple[Any, ...]:
    """What a layer returns: states first, then what some layers add."""
    return output if isinstance(output, tuple) else (output,)
