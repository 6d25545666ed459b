"""A model's passes over a few tokens, compiled: its decoder layers whole, and the linear layers that lie elsewhere.

Between its weights a decoder layer is dozens of operations on small tensors, each of which costs a call; torch.compile
makes a few loops of them. One kernel serves all layers alike: what sets them apart is given to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.cache import TreeCache
from decode.features import find_decoder
from decode.kernels import FEW, TOLERANCE, FewOrMany, difference, for_few, new_kind, run_compiled
from decode.masks import layer_reaches, tree_masks
from decode.packed import pack_layers
from decode.tree import Tree

BEFORE = 8  # tokens before those that layers are tried on; a token less in each further row


def compile_model(model: PreTrainedModel) -> None:
    """Pack all linear layers within a model, in place, and compile passes over a few tokens beside them.

    Raises ValueError where there is nothing to compile, no C++ compiler, or a kernel computes something else.
    """
    if model.device.type != "cpu" or model.dtype not in TOLERANCE:
        raise ValueError("nothing to compile: only models on a CPU (--device cpu), in float32 or bfloat16, are")
    refused: set[type] = set()
    for layer, calls in _watch_layers(model, [(1, nodes) for nodes in range(1, FEW + 1)]).items():
        number = _number(layer)
        if number is None or type(layer) in refused:
            continue
        whole = WholeLayer(layer, number)
        if all(map(whole.agrees, calls)):
            pack_layers(layer)
            layer.forward = whole
        else:
            refused.add(type(layer))  # each try takes a second
    pack_layers(model, FewOrMany)


def compile_batch(model: PreTrainedModel, batch: int) -> None:
    """Compile a model that `compile_model` was given for batches that have a few tokens in all, as rows end one by one.

    What cannot be compiled for them is left to the packed layers, and so are larger batches.
    """
    layers = [module.forward for module in model.modules() if isinstance(vars(module).get("forward"), WholeLayer)]
    shapes = [(rows, nodes) for rows in range(2, batch + 1) for nodes in range(1, FEW // rows + 1)]
    untried = [shape for shape in shapes if any(shape not in layer.kernels for layer in layers)]
    for layer, calls in _watch_layers(model, untried if batch <= FEW else []).items():
        if isinstance(layer.forward, WholeLayer):
            for call in calls:
                layer.forward.agrees(call)


class WholeLayer:
    """The `forward` of a decoder layer in two forms: compiled for a few tokens, with packed weights for more."""

    def __init__(self, layer: nn.Module, number: int) -> None:
        self.few, self.many, self.number = for_few(layer), layer.forward, number
        self.kernels: dict[tuple[int, int], bool] = {}  # whether there is one for so many rows and nodes
        for part in self.few.modules():
            if vars(part).get("layer_idx") is not None:
                vars(part)["layer_idx"] = 0  # it would make a kernel of its own for every layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self.kernels.get(_shape(args, kwargs)) and torch.is_inference_mode_enabled()  # they are made for it
        part = self._take(args, kwargs) if compiled else None
        return self.many(*args, **kwargs) if part is None else self._run(part, args, kwargs)

    @torch.inference_mode()
    def agrees(self, call: Call) -> bool:
        """Whether it can be compiled, which is done now and not later, and then makes of a call what the layer did."""
        shape, part = _shape(call.args, call.kwargs), self._take(call.args, call.kwargs)
        self.kernels[shape] = False
        if part is None or not all(map(_is_plain, (*call.args, *call.kwargs.values()))):
            return False
        for states in (part.keys, part.values):
            torch._dynamo.mark_dynamic(states, 2)
        try:
            with new_kind():
                found = _states(self._run(part, call.args, call.kwargs))
        except Exception:  # whatever torch.compile makes of a model's code
            return False
        self.kernels[shape] = difference(found, call.states) <= TOLERANCE.get(found.dtype, 0.0)
        return self.kernels[shape]

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachePart | None:
        """This layer's part of the KV cache among its arguments; None before it has written to it."""
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, TreeCache)), None)
        shown = None if cache is None else cache.show(self.number)
        return None if cache is None or shown is None else CachePart(*shown, cache.places)

    def _run(self, part: CachePart, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple(part if isinstance(value, TreeCache) else value for value in args)
        kwargs = {name: part if isinstance(value, TreeCache) else value for name, value in kwargs.items()}
        return run_compiled(_forward, self.few, args, kwargs)


@dataclass
class CachePart:
    """What a compiled layer takes for the KV cache: its keys and values [B, H, S, D], and its tokens' slots [B, N]."""

    keys: Tensor
    values: Tensor
    slots: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What `TreeCacheLayer.update` does."""
        row = torch.arange(len(self.slots))[:, None]
        self.keys[row, :, self.slots] = key_states.transpose(1, 2)
        self.values[row, :, self.slots] = value_states.transpose(1, 2)
        return self.keys, self.values


@dataclass(frozen=True)
class Call:
    """What a layer was given in a pass, and the states that it made of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: Tensor


def _watch_layers(model: PreTrainedModel, shapes: Sequence[tuple[int, int]]) -> dict[nn.Module, list[Call]]:
    """Each decoder layer's calls in passes over so many rows and nodes; none where the model fails in them."""
    calls: dict[nn.Module, list[Call]] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.setdefault(layer, []).append(Call(args, kwargs, _states(output)))

    try:
        for rows, nodes in shapes:
            cache = TreeCache(rows)
            _pass(model, cache, BEFORE)
            cache.lengths = [BEFORE - row for row in range(rows)]
            with ExitStack() as stack:
                for layer in find_decoder(model)[1]:
                    stack.callback(layer.register_forward_hook(note, with_kwargs=True).remove)
                _pass(model, cache, nodes)
    except Exception:  # the target's self-test will say what its code does not take
        return {}
    return calls


@torch.inference_mode()
def _pass(model: PreTrainedModel, cache: TreeCache, count: int) -> None:
    """Run a model over so many tokens a row, as a session does."""
    tree = Tree.chain([list(range(count)) for _ in cache.lengths])
    lengths = cache.place(0, count, model.device)
    masks = tree_masks(layer_reaches(model), lengths, tree.ancestors, tree.depth, cache.used, model.dtype)
    for mask in masks.values() if isinstance(masks, dict) else [masks]:
        torch._dynamo.mark_dynamic(mask, 3)
    positions = lengths[:, None] + tree.depth
    model(tree.tokens, attention_mask=masks, position_ids=positions, past_key_values=cache, use_cache=True)


def _number(layer: nn.Module) -> int | None:
    """Which layer of a KV cache a layer writes to; None where that is not one, or where its parts were changed."""
    parts = list(layer.modules())
    if any("forward" in vars(part) for part in parts):
        return None
    if any(part._forward_hooks or part._forward_pre_hooks for part in parts[1:]):
        return None  # a kernel is shared by all layers alike
    numbers = {vars(part).get("layer_idx") for part in parts} - {None}
    return numbers.pop() if len(numbers) == 1 else None


def _is_plain(value: Any) -> bool:
    """Whether an argument is one that a layer only reads, or the KV cache."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, Tensor | TreeCache | int | float | str)


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """The rows and nodes that a layer is called with."""
    rows, nodes = (args[0] if args else kwargs["hidden_states"]).shape[:2]
    return rows, nodes


def _states(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _forward(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer.forward(*args, **kwargs)  # hooks on the layer are run by itself
