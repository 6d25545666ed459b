"""Compiled kernels for a model's passes over a few tokens: for decoder layers, and for linear layers outside of them.

A decoder layer makes dozens of calls on small tensors between its matrix products; a compiler turns them into a few
loops. Layers that differ only in their weights share one kernel, which takes the weights as inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from threading import get_ident
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decode.cpu.compiled_layer import CompiledLayer, RecordedCall, find_cache_layer
from decode.cpu.kernel_cache import Kernel, obtain_kernels
from decode.cpu.kernel_source import KernelSource
from decode.cpu.linear_kernels import LINEAR_TOLERANCE, MAX_LAYER_TOKENS, CompiledLinear, linear_sources
from decode.cpu.packed_linear import can_pack, pack_layers
from decode.models.features import find_decoder
from decode.models.stock_model import StockModel
from decode.session import Session
from decode.tree import Tree

COMMITTED = 8  # tokens in the KV cache when layers are tried; one less in each further row


def compile_model(model: PreTrainedModel, *, retry_failed: bool = True) -> None:
    """Pack a model's linear layers in place, and add compiled kernels for passes over a few tokens.

    retry_failed: compile again what failed before. Raises ValueError, and changes nothing, if there is nothing to
    compile, no C++ compiler, or no place to keep kernels.
    """
    linears = [module for module in model.modules() if can_pack(module)]
    if model.device.type != "cpu" or model.dtype not in LINEAR_TOLERANCE or not linears:
        raise ValueError("nothing to compile: only linear layers on a CPU (--device cpu), in float32 or bfloat16, are")
    kinds = {(linear.weight.dtype, linear.bias is not None) for linear in linears}
    for_linears = [source for kind in kinds for source in linear_sources(*kind)]
    numbers = {layer: find_cache_layer(layer) for layer in find_decoder(model)[1]}
    layers = {layer: CompiledLayer(layer, number) for layer, number in numbers.items() if number is not None}
    try:
        kernels = _compile_layers(model, layers, [1], for_linears, retry_failed)
    except OSError as error:
        raise ValueError(f"cannot keep compiled kernels: {error} (XDG_CACHE_HOME names another folder)") from error
    for failure in kernels:
        if isinstance(failure, str):
            advice = "it needs a C++ compiler such as g++, or go on without"
            raise ValueError(f"kernels cannot be compiled here ({failure}); {advice}")
    for layer, compiled in layers.items():
        if sum(compiled.tried.values()) == MAX_LAYER_TOKENS:
            pack_layers(layer)
            compiled.replace_forward(layer)
    pack_layers(model, CompiledLinear)


def compile_batch(model: PreTrainedModel, batch: int) -> None:
    """Compile a model's kernels for batches of up to `batch` rows too, if the model is compiled.

    Each number of rows has its own kernels. Batches of more than `MAX_LAYER_TOKENS` rows, and what cannot be compiled,
    run the packed layers. Hooks on the model see the passes in which layers are tried.
    """
    layers = {layer: layer.forward for layer in compiled_layers(model)}
    new = [rows for rows in range(2, batch + 1) if any((rows, 1) not in layer.tried for layer in layers.values())]
    if new and batch <= MAX_LAYER_TOKENS:
        with suppress(OSError):  # the cache cannot be written
            _compile_layers(model, layers, new)
        for layer in layers.values():
            layer.tried = {(rows, 1): False for rows in new} | layer.tried


def compiled_layers(model: PreTrainedModel) -> list[Any]:
    """The decoder layers with compiled kernels."""
    return [module for module in model.modules() if isinstance(vars(module).get("forward"), CompiledLayer)]


@torch.inference_mode()  # as in the loop
def _compile_layers(
    model: PreTrainedModel,
    layers: Mapping[nn.Module, CompiledLayer],
    batches: Sequence[int],
    others: Sequence[KernelSource] = (),
    retry_failed: bool = False,
) -> list[Kernel | str]:
    """Obtain the layers' kernels for these numbers of rows and check them. Returns the kernels of `others`."""
    recorded = [pair for rows in batches for pair in _record_calls(model, layers, rows)]
    sources = [layer.kernel_source(call) for layer, call in recorded]
    kernels = obtain_kernels([*sources, *others], retry_failed=retry_failed)
    for (layer, call), kernel in zip(recorded, kernels, strict=False):
        layer.try_kernel(kernel, call)
    return kernels[len(sources) :]


def _record_calls(
    model: PreTrainedModel, layers: Mapping[nn.Module, CompiledLayer], rows: int
) -> list[tuple[CompiledLayer, RecordedCall]]:
    """The layers' calls in passes over up to `MAX_LAYER_TOKENS`, if kernels can serve them. Empty if a pass fails."""
    calls: list[tuple[CompiledLayer, RecordedCall]] = []
    thread = get_ident()

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = layers[layer].record(args, kwargs, output) if get_ident() == thread else None
        if call is not None:
            calls.append((layers[layer], call))

    try:
        session = Session(StockModel(model), rows)
        session.verify(Tree.chain([[*range(COMMITTED)]] * rows))
        session.cache.lengths = [COMMITTED - row for row in range(rows)]
        with ExitStack() as stack:
            for layer in layers:
                stack.callback(layer.register_forward_hook(record, with_kwargs=True, prepend=True).remove)
            for nodes in range(1, MAX_LAYER_TOKENS // rows + 1):
                session.verify(Tree.chain([[*range(nodes)]] * rows))
    except Exception:  # the target's self-test reports what the model's code does not take
        return []
    return calls
