"""A decoder layer in two forms: compiled for a few tokens, with packed weights for more."""

from __future__ import annotations

import hashlib
import inspect
from collections import OrderedDict
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedConfig

from decode.cpu.kernel_cache import Kernel, Recipe
from decode.cpu.layer_calls import Form, LayerCall, free_sizes, put_together, take_apart
from decode.cpu.linear_kernels import for_few, may_run

TYPICAL = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # error of a compiled layer, as a share of what the layer adds
# What every module holds: tensors, parts and hooks. A layer's number is all that sets most layers apart.
STATE = {*vars(nn.Module()), "layer_idx"}

Shape = tuple[int, int]  # rows and nodes


class Trial(NamedTuple):
    """A layer's call in a pass of the model that was to see it, the states given to it and those that it made."""

    call: LayerCall
    given: Tensor
    output: Any

    @classmethod
    def of(cls, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Trial | None:
        """The call of a layer that writes to that part of the KV cache; None where a kernel could not serve."""
        call = take_apart(number, args, kwargs)
        given = args[0] if args else kwargs.get("hidden_states")
        states, *rest = _parts(output)
        if call is None or not (isinstance(given, Tensor) and isinstance(states, Tensor)):
            return None
        return cls(call, given, output) if all(part is None or isinstance(part, Tensor) for part in rest) else None


class WholeLayer:
    """The `forward` of a decoder layer in two forms: compiled for a few tokens, with packed weights for more."""

    def __init__(self, layer: nn.Module, number: int) -> None:
        self.number = number
        self.tried: dict[Shape, bool] = {}  # whether there is a kernel
        self._kernels: dict[Form, Kernel] = {}
        self._few = _lone_copy(layer)
        self._description = _describe(self._few)
        self._tensors = {**dict(self._few.named_parameters()), **dict(self._few.named_buffers())}
        self._returns: tuple[bool, ...] | None = None  # which parts of what it returns are tensors; None: not a tuple
        self._layer = ref(layer)  # it holds this, and a cycle would keep its weights
        self._hooks: list[dict[int, Any]] = []

    def serve(self, layer: nn.Module) -> None:
        """Take the place of a layer's forward."""
        layer.forward = self
        parts = [*layer.modules()][1:]  # hooks on the layer itself are run by itself
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = take_apart(self.number, args, kwargs) if may_run() and not any(self._hooks) else None
        kernel = None if call is None else self._kernels.get(call.form)
        if call is None or kernel is None:
            layer: Any = self._layer()
            return type(layer).forward(layer, *args, **kwargs)
        tensors = iter(self._run(kernel, call))
        if self._returns is None:
            return next(tensors)
        return tuple(next(tensors) if is_tensor else None for is_tensor in self._returns)

    def recipe(self, form: Form, examples: list[Tensor]) -> Recipe:
        """How a kernel is made for calls of this form."""
        few, names = self._few, list(self._tensors)

        def compute(inputs: list[Tensor]) -> list[Tensor]:
            args, kwargs = put_together(form, inputs[len(names) :])
            output = functional_call(few, dict(zip(names, inputs, strict=False)), args, kwargs)
            return [part for part in _parts(output) if part is not None]

        free = [*[() for _ in names], *free_sizes(form)]
        return Recipe((self._description, form), compute, [*self._tensors.values(), *examples], free)

    def try_kernel(self, kernel: Kernel | str, trial: Trial) -> None:
        """Take a kernel if it makes of a call what the layer did.

        A token's typical error counts, as a share of what the layer typically adds. Not as a share of the largest
        numbers: real models have a few huge ones, beside which no error shows.
        """
        shape, expected = _shape(trial.given), _parts(trial.output)[0]
        self.tried[shape] = False
        if isinstance(kernel, str):
            return
        try:
            found = self._run(kernel, trial.call)[0]
        except RuntimeError:  # of a kernel
            return
        errors, added = ((expected - other).float().abs().median(dim=-1).values for other in (found, trial.given))
        if float((errors / added.clamp(min=1e-30)).max()) <= TYPICAL.get(expected.dtype, 0.0):
            self.tried[shape] = True
            is_tuple = isinstance(trial.output, tuple)
            self._returns = tuple(part is not None for part in trial.output) if is_tuple else None
            self._kernels[trial.call.form] = kernel

    def _run(self, kernel: Kernel, call: LayerCall) -> list[Tensor]:
        return kernel([*self._tensors.values(), *call.tensors])


def cache_number(layer: nn.Module) -> int | None:
    """Which layer of a KV cache a layer writes to; None where that is not one, or where its parts were changed."""
    parts = list(layer.modules())
    if any("forward" in vars(part) for part in parts):
        return None
    if any(part._forward_hooks or part._forward_pre_hooks for part in parts[1:]):
        return None  # a kernel is shared by all layers alike
    numbers = {vars(part).get("layer_idx") for part in parts} - {None}
    return numbers.pop() if len(numbers) == 1 else None


def _lone_copy(layer: nn.Module) -> nn.Module:
    """A copy for a few tokens, without what sets most layers apart: its number and the hooks on it."""
    copied = for_few(layer)
    copied._forward_hooks, copied._forward_pre_hooks = OrderedDict(), OrderedDict()
    for part in copied.modules():
        if vars(part).get("layer_idx") is not None:
            vars(part)["layer_idx"] = 0
    return copied


def _describe(module: nn.Module) -> tuple[Any, ...]:
    """What a module computes with, tensors aside: its code and whatever it holds, part by part."""
    return tuple(
        (
            name,
            type(part).__qualname__,
            _code(type(part)),
            sorted((key, _say(value)) for key, value in vars(part).items() if key not in STATE),
        )
        for name, part in module.named_modules()
    )


def _say(value: Any) -> str:
    if isinstance(value, PreTrainedConfig):
        return f"{value.to_json_string()} {value._attn_implementation}"
    if isinstance(value, Tensor):
        return repr(value.tolist())
    made = value if isinstance(value, FunctionType) else type(value)
    said = repr(value)
    return said if " at 0x" not in said else f"{_code(made)} {made.__qualname__}"


def _code(made: Any) -> str:
    """A digest of the file where a class or function is written."""
    try:
        return _digest(inspect.getfile(made))
    except (TypeError, OSError):  # built in
        return str(made)


@cache
def _digest(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _shape(states: Tensor) -> Shape:
    rows, nodes = states.shape[:2]
    return rows, nodes


def _parts(output: Any) -> tuple[Any, ...]:
    """What a layer returns: states first, and whatever some layers return beside them."""
    return output if isinstance(output, tuple) else (output,)
