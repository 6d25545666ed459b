"""A model's passes over a few tokens, compiled: its decoder layers whole, and the linear layers that lie elsewhere.

Between its weights a decoder layer is dozens of operations on small tensors, each of which costs a call; a compiler
makes a few loops of them. One kernel serves all layers alike: what sets them apart is given to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from threading import get_ident
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decode.cpu.compiled_layer import Shape, Trial, WholeLayer, cache_number
from decode.cpu.kernel_cache import Recipe, obtain_kernels
from decode.cpu.linear_kernels import FEW, TOLERANCE, FewOrMany, linear_recipes
from decode.cpu.packed_linear import can_pack, pack_layers
from decode.kv_cache import TreeCache
from decode.masks import attention_windows, tree_masks
from decode.models.features import find_decoder
from decode.tree import Tree

BEFORE = 8  # tokens before those that layers are tried on; one less in each further row


def compile_model(model: PreTrainedModel, *, again: bool = True) -> None:
    """Pack all linear layers within a model, in place, and have compiled kernels for passes over a few tokens.

    again: try once more what could not be compiled before. Raises ValueError, and changes nothing, where there is
    nothing to compile, no C++ compiler, or no place to keep kernels.
    """
    linears = [module for module in model.modules() if can_pack(module)]
    if model.device.type != "cpu" or model.dtype not in TOLERANCE or not linears:
        raise ValueError("nothing to compile: only linear layers on a CPU (--device cpu), in float32 or bfloat16, are")
    kinds = {(linear.weight.dtype, linear.bias is not None) for linear in linears}
    simple = [recipe for kind in kinds for recipe in linear_recipes(*kind)]
    numbers = {layer: cache_number(layer) for layer in find_decoder(model)[1]}
    wholes = {layer: WholeLayer(layer, number) for layer, number in numbers.items() if number is not None}
    try:
        _try_on(model, wholes, [(1, nodes) for nodes in range(1, FEW + 1)], simple, again)
        failures = [found for found in obtain_kernels(simple) if isinstance(found, str)]
    except OSError as error:
        raise ValueError(f"cannot keep compiled kernels: {error} (XDG_CACHE_HOME names another folder)") from error
    if failures:
        raise ValueError(
            f"kernels cannot be compiled here ({failures[0]}); it needs a C++ compiler such as g++, or go on without"
        )
    for layer, whole in wholes.items():
        if sum(whole.tried.values()) == FEW:
            pack_layers(layer)
            whole.serve(layer)
    pack_layers(model, FewOrMany)


def compile_batch(model: PreTrainedModel, batch: int) -> None:
    """See that a compiled model's passes over a few tokens of `batch` rows or fewer are compiled, too.

    They have to be for each number of rows. What cannot be compiled is left to the packed layers, and so are larger
    batches. Hooks on the model see the passes on which layers are tried.
    """
    wholes = {layer: layer.forward for layer in whole_layers(model)}
    shapes = [(rows, nodes) for rows in range(1, batch + 1) for nodes in range(1, FEW // rows + 1)]
    new = [shape for shape in shapes if any(shape not in whole.tried for whole in wholes.values())]
    if new and batch <= FEW:
        with suppress(OSError):  # of the folder where kernels are kept
            _try_on(model, wholes, new)
        for whole in wholes.values():
            whole.tried = dict.fromkeys(new, False) | whole.tried


def whole_layers(model: PreTrainedModel) -> list[Any]:
    """The decoder layers of a model that are compiled whole."""
    return [module for module in model.modules() if isinstance(vars(module).get("forward"), WholeLayer)]


@torch.inference_mode()  # as the loop has it
def _try_on(
    model: PreTrainedModel,
    wholes: Mapping[nn.Module, WholeLayer],
    shapes: Sequence[Shape],
    others: Sequence[Recipe] = (),
    again: bool = False,
) -> None:
    """Obtain the layers' kernels for these shapes, and others beside them; try the layers' in passes of the model."""
    widths: dict[int, list[int]] = {}
    for rows, nodes in shapes:
        widths.setdefault(rows, []).append(nodes)
    trials = [trial for rows in widths for trial in _watch_layers(model, wholes, rows, widths[rows])]
    recipes = [whole.recipe(trial.call.form, trial.call.tensors) for whole, trial in trials]
    kernels = obtain_kernels([*recipes, *others], again=again)
    for (whole, trial), kernel in zip(trials, kernels, strict=False):
        whole.try_kernel(kernel, trial)


def _watch_layers(
    model: PreTrainedModel, wholes: Mapping[nn.Module, WholeLayer], rows: int, widths: Sequence[int]
) -> list[tuple[WholeLayer, Trial]]:
    """The layers' calls in passes over so many rows and nodes, if kernels could serve them; none where it fails."""
    trials: list[tuple[WholeLayer, Trial]] = []
    thread = get_ident()

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        trial = Trial.of(wholes[layer].number, args, kwargs, output) if get_ident() == thread else None
        if trial is not None:
            trials.append((wholes[layer], trial))

    try:
        cache = TreeCache(rows)
        _pass(model, cache, BEFORE)
        cache.lengths = [BEFORE - row for row in range(rows)]
        with ExitStack() as stack:
            for layer in wholes:
                stack.callback(layer.register_forward_hook(note, with_kwargs=True, prepend=True).remove)
            for nodes in widths:
                _pass(model, cache, nodes)
    except Exception:  # the target's self-test will say what its code does not take
        return []
    return trials


def _pass(model: PreTrainedModel, cache: TreeCache, count: int) -> None:
    """Run a model over so many tokens a row, as a session does."""
    tree = Tree.chain([list(range(count)) for _ in cache.lengths])
    lengths = cache.reserve(0, count, model.device)
    masks = tree_masks(attention_windows(model), lengths, tree.ancestors, tree.depth, cache.used, model.dtype)
    positions = lengths[:, None] + tree.depth
    model(tree.tokens, attention_mask=masks, position_ids=positions, past_key_values=cache, use_cache=True)
