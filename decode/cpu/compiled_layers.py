"""Compiled decoder layers: a model's layers run one kernel each instead of dozens of calls on small tensors.

The layers are first run as they are, in passes of different sizes. What differs between those calls shows which sizes
may change, and what the layers computed is what their kernels are checked against, each time a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from operator import is_
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import PreTrainedModel

from decode.cpu.layer_kernel import (
    Kernel,
    LayerCall,
    compile_kernel,
    find_cache,
    flatten_call,
    layer_tensors,
    load_kernel,
    name_kernel,
    split_output,
)
from decode.devices.user_cache import build_folder, build_once, print_notice_once
from decode.kv_cache import KVCache
from decode.models.stock_model import StandIn, StockModel, find_decoder
from decode.prefill import read_texts
from decode.session import Session
from decode.trees.tree import Tree

# The largest error of a kernel: a token's median error, as a share of what the layer typically adds to its state.
# A share of the largest state would hide errors: real models have a few huge ones.
LAYER_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
MOST_SHAPES = 1 << 12  # sizes of calls that a kernel remembers
# Rows, nodes and committed tokens of the passes, most rows first. All sizes of the first two differ, the slots in use
# too: 64 and 128.
TRIALS = ((2, 5, 8), (1, 1, 70), (1, 17, 8))


class RecordedCall(NamedTuple):
    """A layer's call in a pass of the model, its arguments as they were, and what it returned."""

    call: LayerCall
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def continues(self, before: RecordedCall) -> bool:
        """Whether this layer took what another one returned, and the same arguments otherwise."""
        is_next = bool(self.args and before.args) and self.args[0] is before.output
        return is_next and _are_same(self.args[1:], self.kwargs, before.args[1:], before.kwargs)


class ComputedLayers(NamedTuple):
    """What several layers computed in one call: the last one's number and states, and the arguments besides states."""

    last: int
    states: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Signature:
    """The calls that a kernel was compiled for. Layers with the same kernel share it."""

    def __init__(self, call: LayerCall, dimensions: Sequence[tuple[Any, ...]]) -> None:
        self._form, self._dimensions = call.form, dimensions[:-2]  # without keys and values
        self._shapes: dict[tuple[int, int, int], list[torch.Size]] = {}  # of a call's tensors, by its sizes

    def fits(self, call: LayerCall) -> bool:
        """Whether the kernel, which checks nothing, can serve a call."""
        if call.form != self._form:
            return False
        shapes = self._shapes.get(call.sizes)
        if shapes is None:
            sizes = dict(zip("BNS", call.sizes, strict=True))
            shapes = [torch.Size(sizes.get(size, size) for size in each) for each in self._dimensions]
            if len(self._shapes) >= MOST_SHAPES:  # of long texts, in flat passes of any number of tokens
                self._shapes.clear()
            self._shapes[call.sizes] = shapes
        return [tensor.shape for tensor in call.tensors] == shapes


class CompiledLayer(StandIn):
    """The `forward` of a decoder layer: its kernel for calls that it was compiled for, the layer itself for others.

    stored: keys and values as it writes them.
    following: the layer after it, if it runs the same kernel on what this one returns. All such layers are computed in
    one call, up to one that someone watches or has replaced.
    """

    def __init__(
        self, layer: nn.Module, number: int, kernel: Kernel, signature: Signature, stored: tuple[Tensor, Tensor]
    ) -> None:
        self.number, self._kernel, self._signature = number, kernel, signature
        self._stored = [states.new_empty(0, states.shape[1], 0, states.shape[3]) for states in stored]
        self.following: CompiledLayer | None = None
        self._tensors = [*layer_tensors(layer).values()]
        self._layer = ref(layer)  # the layer holds this object; a cycle would keep its weights alive
        parts = [*layer.modules()][1:]  # the layer itself still runs its own hooks
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._returns: tuple[bool, ...] | None = None  # which parts of its output are tensors; None: it is no tuple

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = find_cache(args, kwargs)
        if cache is not None and (computed := self._find_computed(cache, args, kwargs)) is not None:
            return computed
        call = None
        if cache is not None and not torch.is_grad_enabled() and not any(self._hooks):
            if args and isinstance(args[0], Tensor) and args[0].dtype == self._stored[0].dtype:
                self._allocate(cache)
            call = flatten_call(self.number, args, kwargs)
        if cache is None or call is None or not self._signature.fits(call):
            layer: Any = self._layer()
            return type(layer).forward(layer, *args, **kwargs)
        layers = self._find_layers(cache)
        weights = [each for layer in layers for each in layer._tensors]
        stored = [states for layer in layers for states in cache.allocated(layer.number) or ()]
        tensors = iter(self._kernel(weights, call.tensors, stored))
        if self._returns is not None:
            return tuple(next(tensors) if is_tensor else None for is_tensor in self._returns)
        states = next(tensors)
        if len(layers) > 1:
            cache.computed = ComputedLayers(layers[-1].number, states, args[1:], kwargs)
        return states

    def _find_computed(self, cache: KVCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The states after this layer, if an earlier one's call has computed it: those that it is called with."""
        computed: ComputedLayers | None = cache.computed
        if computed is None or not args or args[0] is not computed.states:
            return None
        if self.number == computed.last:
            cache.computed = None
        if not _are_same(args[1:], kwargs, computed.args, computed.kwargs):
            raise RuntimeError(f"layer {self.number} has other arguments than in the trials of its kernel")
        return computed.states

    def _find_layers(self, cache: KVCache) -> list[CompiledLayer]:
        """This layer and those after it that are computed with it."""
        layers: list[CompiledLayer] = [self]
        if _global_forward_hooks or _global_forward_pre_hooks:
            return layers
        while (after := layers[-1].following) is not None and after._allocate(cache):
            before: Any = layers[-1]._layer()
            layer: Any = after._layer()
            if any(after._hooks) or not (layers[-1]._is_forward_of(before) and after._is_forward_of(layer)):
                break
            if before._forward_hooks or layer._forward_pre_hooks:
                break
            layers.append(after)
        return layers

    def _allocate(self, cache: KVCache) -> bool:
        """Allocate its part of the cache, before the first write. Returns whether that holds keys and values alone."""
        return cache.allocate(self.number, *self._stored) is not None

    def _is_forward_of(self, layer: Any) -> bool:
        """Whether nobody has replaced it."""
        return vars(layer).get("forward") is self

    def may_follow(self, other: CompiledLayer) -> bool:
        """Whether one call can compute both, if this layer takes what the other returns."""
        is_alike = self._kernel is other._kernel and self._returns is other._returns is None
        return is_alike and self.number == other.number + 1

    @torch.no_grad()
    def is_correct(self, recorded: RecordedCall) -> bool:
        """Whether the kernel computes what the layer did, up to `LAYER_TOLERANCE`."""
        expected = split_output(recorded.output)
        self._returns = tuple(part is not None for part in expected) if isinstance(recorded.output, tuple) else None
        if not self._signature.fits(recorded.call):
            return False
        try:
            states = self._kernel(self._tensors, recorded.call.tensors, [*recorded.call.stored])[0]
        except RuntimeError:
            return False
        pairs = (expected[0] - other for other in (states, recorded.call.tensors[0]))
        error, added = (difference.float().abs().median(dim=-1).values for difference in pairs)
        return float((error / added.clamp(min=1e-30)).max()) <= LAYER_TOLERANCE.get(states.dtype, 0.0)


def compile_layers(target: StockModel, *, retry_failed: bool = False) -> None:
    """Let the decoder layers of a target's packed model run kernels, in place. Those without a correct one stay.

    retry_failed: compile again what failed before.
    """
    kernels: dict[str, Kernel | None] = {}
    signatures: dict[str, Signature] = {}
    trusted: set[str] = set()  # kernels that were right in all trials; their other layers differ in weights alone
    before: tuple[CompiledLayer, list[RecordedCall]] | None = None
    for layer, (number, calls) in _record_calls(target).items():
        dimensions = _find_dimensions(calls[0].call, calls[1].call)
        last, before = before, None
        if dimensions is None:
            continue
        name = name_kernel(layer, calls[0].call.form, dimensions)
        if name not in kernels:
            compile = partial(compile_kernel, layer, calls[0].call, dimensions)
            kernels[name] = obtain_kernel(name, compile, retry_failed=retry_failed)
        kernel = kernels[name]
        if kernel is not None:
            signature = signatures.setdefault(name, Signature(calls[0].call, dimensions))
            compiled = CompiledLayer(layer, number, kernel, signature, calls[0].call.stored)
            if all(map(compiled.is_correct, calls[:1] if name in trusted else calls)):
                layer.forward = compiled
                trusted.add(name)
                before = compiled, calls
                if (
                    last is not None
                    and compiled.may_follow(last[0])
                    and all(map(RecordedCall.continues, calls, last[1]))
                ):
                    last[0].following = compiled


def compiled_layers(model: PreTrainedModel) -> list[CompiledLayer]:
    """The kernels of a model's decoder layers."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return [forward for forward in forwards if isinstance(forward, CompiledLayer)]


@torch.inference_mode()  # as in the loop
def _record_calls(target: StockModel) -> dict[nn.Module, tuple[int, list[RecordedCall]]]:
    """The cache layer and the calls of each decoder layer, one call in each of `TRIALS`; without unusual layers."""
    numbers = {layer: _find_cache_layer(layer) for layer in find_decoder(target.model)[1]}
    layers = {layer: (number, list[RecordedCall]()) for layer, number in numbers.items() if number is not None}
    thread = get_ident()

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        number, calls = layers[layer]
        call = flatten_call(number, args, kwargs) if get_ident() == thread else None
        if call is not None and all(part is None or isinstance(part, Tensor) for part in split_output(output)):
            calls.append(RecordedCall(call, args, kwargs, output))

    with ExitStack() as stack:
        try:
            sessions = _start_sessions(target)
            for layer in layers:
                stack.callback(layer.register_forward_hook(record, with_kwargs=True, prepend=True).remove)
            for session, (rows, nodes, _) in zip(sessions, TRIALS, strict=True):
                session.verify(Tree.chain([[*range(1, nodes + 1)]] * rows))
        except Exception:  # the target's self-test reports what the model's code does not take
            return {}
    return {layer: found for layer, found in layers.items() if len(found[1]) == len(TRIALS)}


def _start_sessions(target: StockModel) -> list[Session]:
    """A session for each of `TRIALS`, with one committed token fewer in each further row.

    Three tokens are computed, once, so that no two layers and rows have the same cache.
    """
    computed, sessions = Session(target, TRIALS[0][0]), []
    read_texts(computed, [[row + 1, row + 2, row + 3] for row in range(TRIALS[0][0])])
    for rows, _, committed in TRIALS:
        computed.select(range(rows))
        session = computed.open(rows)
        session.replace(range(rows), computed, range(rows))
        session.cache.lengths = [committed - row for row in range(rows)]
        sessions.append(session)
    return sessions


def _find_cache_layer(layer: nn.Module) -> int | None:
    """The layer of the KV cache that a decoder layer writes to; None if unclear, or if its parts were changed."""
    parts = list(layer.modules())
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts[1:])  # layers share a kernel
    numbers: set[Any] = {vars(part).get("layer_idx") for part in parts} - {None}
    if hooked or any("forward" in vars(part) for part in parts) or len(numbers) != 1:
        return None
    number: int = numbers.pop()
    return number


def _find_dimensions(one: LayerCall, other: LayerCall) -> list[tuple[Any, ...]] | None:
    """For each tensor of a call, each dimension's symbol, or its size if it is fixed; None if unclear.

    Symbols are B, N and S, and C in the KV cache.
    """
    symbols = dict(zip(zip(one.sizes, other.sizes, strict=True), "BNS", strict=True))
    dimensions = []
    shapes = ([tensor.shape for tensor in (*call.tensors, *call.stored)] for call in (one, other))
    for shape, changed in zip(*shapes, strict=True):
        pairs = list(zip(shape, changed, strict=True))
        dimensions.append(tuple(a if a == b else symbols.get((a, b)) for a, b in pairs))
    for place in (-2, -1):
        batch, heads, _, size = dimensions[place]
        dimensions[place] = batch, heads, "C", size
    known = all(size is not None for sizes in dimensions for size in sizes)
    return dimensions if known and one.form == other.form and any("S" in sizes for sizes in dimensions) else None


def _are_same(args: tuple[Any, ...], kwargs: dict[str, Any], others: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether arguments are the very same objects as others."""
    is_alike = len(args) == len(others) and kwargs.keys() == named.keys()
    return is_alike and all(map(is_, (*args, *kwargs.values()), (*others, *named.values())))


_LOADED: dict[str, Kernel] = {}
FAILED = "layers are not compiled"  # a kind of notice


def obtain_kernel(name: str, compile: Callable[[Path], None], *, retry_failed: bool = False) -> Kernel | None:
    """The kernel, compiled if it is not in the cache. If it cannot be compiled, None; the user is told why.

    compile: compiles it into a file. retry_failed: also if that failed before.
    """
    if name not in _LOADED:
        failure = build_folder() / f"{name}.failed"
        if failure.exists() and not retry_failed:
            reason = f"compiling them failed before: see {failure}"
            print_notice_once(FAILED, f"layers are not compiled, so decoding is slower; {reason}")
            return None

        def build(into: Any) -> None:
            print_notice_once(
                "compiling", "compiling kernels for models or heads of this kind, once; each takes some 10 seconds"
            )
            compile(into)

        try:
            _LOADED[name] = load_kernel(build_once(f"{name}.so", build))
            failure.unlink(missing_ok=True)
        except Exception as error:  # anything from torch.export, Inductor, the compiler, the model's code or the disk
            reason = f"{type(error).__name__}: {error}"
            print_notice_once(FAILED, f"layers are not compiled, so decoding is slower: {reason.splitlines()[0]}")
            with suppress(OSError):
                failure.write_text(reason)
            return None
    return _LOADED[name]
