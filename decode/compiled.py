"""A model's passes over a few tokens, compiled: its decoder layers whole, and the linear layers that lie elsewhere.

Between its weights a decoder layer is dozens of operations on small tensors, each of which costs a call; torch.compile
makes a few loops of them. One kernel serves all layers alike: what sets them apart is given to it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.cache import TreeCache
from decode.features import find_decoder
from decode.kernels import FEW, TOLERANCE, FewOrMany, for_few, new_kind, run_compiled, state_of_torch
from decode.masks import layer_reaches, tree_masks
from decode.packed import pack_layers
from decode.tree import Tree

BEFORE = 8  # tokens before those that layers are tried on; one less in each further row
TYPICAL = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # error of a compiled layer, as a share of what the layer adds


def compile_model(model: PreTrainedModel) -> None:
    """Pack all linear layers within a model, in place, and compile passes over a few tokens beside them.

    Raises ValueError where there is nothing to compile, no C++ compiler, or a kernel computes something else.
    """
    if model.device.type != "cpu" or model.dtype not in TOLERANCE:
        raise ValueError("nothing to compile: only models on a CPU (--device cpu), in float32 or bfloat16, are")
    for layer, whole in _compile_layers(model).items():
        pack_layers(layer)
        whole.serve(layer)
    pack_layers(model, FewOrMany)
    if not whole_layers(model) and not any(isinstance(module, FewOrMany) for module in model.modules()):
        raise ValueError("nothing to compile: this model has no linear layers in float32 or bfloat16")


@torch.inference_mode()  # as the loop has it
def compile_batch(model: PreTrainedModel, batch: int) -> None:
    """See that a compiled model's passes over a few tokens of `batch` rows or fewer are compiled, too.

    They have to be for each number of rows, and anew for another number of threads. What cannot be compiled is left to
    the packed layers, and so are larger batches. Hooks on the model see the passes on which layers are tried.
    """
    layers = {layer: layer.forward for layer in whole_layers(model)}
    shapes = [(rows, nodes) for rows in range(1, batch + 1) for nodes in range(1, FEW // rows + 1)]
    for shape in shapes if batch <= FEW else []:
        if any(whole.is_new(shape) for whole in layers.values()):
            for layer, call in _watch_layers(model, shape).items():
                if layer in layers:
                    layers[layer].agrees(call)


def whole_layers(model: PreTrainedModel) -> list[Any]:
    """The decoder layers of a model that are compiled whole."""
    return [module for module in model.modules() if isinstance(vars(module).get("forward"), WholeLayer)]


class WholeLayer:
    """The `forward` of a decoder layer in two forms: compiled for a few tokens, with packed weights for more."""

    def __init__(self, layer: nn.Module, number: int) -> None:
        self.few, self.number = for_few(layer), number
        self.kernels: dict[tuple[Any, ...], bool] = {}  # by rows, nodes and torch's state: whether there is one
        self._layer = ref(layer)  # it holds this, and a cycle would keep its weights
        self._hooks: list[dict[int, Any]] = []
        for part in self.few.modules():
            if vars(part).get("layer_idx") is not None:
                vars(part)["layer_idx"] = 0  # it would make a kernel of its own for every layer

    def serve(self, layer: nn.Module) -> None:
        """Take the place of a layer's forward."""
        layer.forward = self
        parts = [*layer.modules()][1:]  # hooks on the layer itself are run by itself
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self.kernels.get(_key(_shape(args, kwargs))) and not any(self._hooks)
        part = self._part_of_cache(args, kwargs) if compiled else None
        if part is not None:
            return self._run(part, args, kwargs)
        layer: Any = self._layer()
        return type(layer).forward(layer, *args, **kwargs)

    def is_new(self, shape: tuple[int, int]) -> bool:
        """Whether it has not been tried on so many rows and nodes, as torch is now."""
        return _key(shape) not in self.kernels

    def agrees(self, call: Call) -> bool:
        """Whether it can be compiled, which is done now and not later, and then makes of a call what the layer did."""
        key = _key(_shape(call.args, call.kwargs))
        self.kernels[key] = self._off_by(call) <= TYPICAL.get(call.states.dtype, 0.0)
        return self.kernels[key]

    def _off_by(self, call: Call) -> float:
        """A token's typical error, as a share of what the layer typically adds; infinite where it cannot be compiled.

        Not as a share of the largest numbers: real models have a few huge ones, beside which no error shows.
        """
        part = self._part_of_cache(call.args, call.kwargs)
        if part is None or not all(map(_is_plain, (*call.args, *call.kwargs.values()))):
            return float("inf")
        for states in (part.keys, part.values):
            torch._dynamo.mark_dynamic(states, 2)
        try:
            with new_kind():
                found = _states(self._run(part, call.args, call.kwargs))
        except Exception:  # whatever torch.compile makes of a model's code
            return float("inf")
        errors, added = (
            (call.states - other).float().abs().median(dim=-1).values
            for other in (found, _input(call.args, call.kwargs))
        )
        return float((errors / added.clamp(min=1e-30)).max())

    def _part_of_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachePart | None:
        """This layer's part of the KV cache among its arguments; None before it was written, in the loop's mode."""
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, TreeCache)), None)
        shown = None if cache is None else cache.show(self.number)
        if cache is None or shown is None or not shown[0].is_inference():
            return None
        return CachePart(*shown, cache.places)

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


@torch.inference_mode()
def _compile_layers(model: PreTrainedModel) -> dict[nn.Module, WholeLayer]:
    """The decoder layers that can be compiled whole, for any few tokens of one row."""
    found: dict[nn.Module, WholeLayer] = {}
    refused: set[tuple[type, ...]] = set()
    for nodes in range(1, FEW + 1):
        for layer, call in _watch_layers(model, (1, nodes)).items():
            number, kind = _number(layer), tuple(map(type, layer.modules()))
            if nodes == 1 and number is not None:
                found[layer] = WholeLayer(layer, number)
            if layer in found and (kind in refused or not found[layer].agrees(call)):
                del found[layer]
                refused.add(kind)  # each try takes a second
    return found


def _watch_layers(model: PreTrainedModel, shape: tuple[int, int]) -> dict[nn.Module, Call]:
    """Each decoder layer's call in a pass over so many rows and nodes; none where the model fails in it."""
    calls: dict[nn.Module, Call] = {}
    rows, nodes = shape
    thread = get_ident()

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if get_ident() == thread:
            calls[layer] = Call(args, kwargs, _states(output))

    try:
        cache = TreeCache(rows)
        _pass(model, cache, BEFORE)
        cache.lengths = [BEFORE - row for row in range(rows)]
        with ExitStack() as stack:
            for layer in find_decoder(model)[1]:
                stack.callback(layer.register_forward_hook(note, with_kwargs=True, prepend=True).remove)
            _pass(model, cache, nodes)
    except Exception:  # the target's self-test will say what its code does not take
        return {}
    return calls


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


def _key(shape: tuple[int, int]) -> tuple[Any, ...]:
    return *shape, *state_of_torch()


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """The rows and nodes that a layer is called with."""
    rows, nodes = _input(args, kwargs).shape[:2]
    return rows, nodes


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    states = args[0] if args else kwargs["hidden_states"]
    assert isinstance(states, Tensor)
    return states


def _states(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _forward(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer.forward(*args, **kwargs)  # not layer(): hooks on it are run by the layer itself
