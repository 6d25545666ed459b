"""Heads made fast: packed layers of 8 bits and compiled passes on a CPU; merged layers, and drafts as CUDA graphs, on a
GPU.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from decode.devices.backend import find_backend
from decode.devices.graph import Captured, GraphPool, forget_oldest, round_up
from decode.weights.layers import make_linear
from heads import LayerCache
from heads.head_pass import HeadPass
from heads.layers import Positions
from heads.vocabulary import VocabularyHead
from proposers.feature_history import attend_like_target
from proposers.search import Draft
from proposers.tree_proposer import Inputs

BY_TOKEN = ("features", "following")  # inputs [B, T, ...], whose tokens are padded at the right
FEWEST = 8  # tokens of an input; fewer take as long


def pack_head(head: VocabularyHead) -> Any:
    """A copy of the head for inference, with packed or merged layers. It shares all other tensors with the head."""
    tensors = [*head.parameters(), *head.buffers()]
    packed: Any = copy.deepcopy(head, {id(tensor): tensor for tensor in tensors})
    packed.outputs = pack_outputs(head)
    for name in ("lm_head", "lm_heads"):
        if hasattr(packed, name):
            delattr(packed, name)  # the packed output layer replaces it
    find_backend(next(head.parameters()).device).pack_drafter(packed)
    return packed


def pack_outputs(head: Any) -> tuple[nn.Module, ...]:
    """The output layers of a head, packed."""
    count = head.config.heads if head.output == "own" else 1
    outputs = nn.ModuleList(make_linear(*head.output_layer(index)) for index in range(count))
    find_backend(head.output_layer(0)[0].device).pack_drafter(outputs)
    return tuple(outputs)


class FastPass:
    """A packed EAGLE head's pass over tokens and features, compiled where the device can do that."""

    def __init__(self, head: Any, dtype: torch.dtype, *, compiles: bool = False) -> None:
        self.head, self._compiled, self._frequencies = head, None, torch.empty(0)
        if compiles and getattr(head.config, "layers", 1) == 1:
            module = HeadPass(forget_target(head), attend_like_target).eval()
            example, fixed = module.make_example(dtype), str.islower
            dimensions = [
                [size if fixed(name) or name == "1" else name for name, size in zip(names, tensor.shape, strict=True)]
                for names, tensor in zip(module.dimensions, example, strict=True)
            ]
            self._compiled = find_backend(example[0].device).compile_module(module, example, dimensions)
            self._frequencies = example[3]

    @property
    def is_compiled(self) -> bool:
        """Whether passes after the first one are compiled; these take positions, no table of them."""
        return self._compiled is not None

    def __call__(
        self,
        embedded: Tensor,
        features: Tensor,
        cache: LayerCache,
        positions: Positions,
        mask: Tensor | None = None,
        slots: slice | None = None,
    ) -> Tensor:
        """States [B, T, H] of text tokens at positions [B, T]; or of draft tokens, with a mask and slots as for
        `LayerCache.attend`."""
        is_first = cache.held is None or cache.sees is not None
        if self._compiled is None or is_first or not isinstance(positions, Tensor):
            attend = cache.attend if mask is None else partial(cache.attend, mask=mask, slots=slots)
            states: Tensor = self.head(embedded, features, positions, attend)
            return states
        if mask is None or slots is None:
            mask, places = cache.prepare(positions, embedded.dtype), positions
        else:
            cache.reserve(slots.stop)
            places = torch.arange(slots.start, slots.stop).expand_as(positions)
        given = embedded, features, positions, self._frequencies, mask, places
        return self._compiled(*given, *cache.allocated())


def forget_target(head: Any) -> Any:
    """The head without the name of its target, so that heads of a kind share a kernel."""
    alike = copy.copy(head)
    alike.config = replace(head.config, target_name=None, target_weights=None)
    return alike


class DraftGraphs:
    """Runs a head's drafts as CUDA graphs: one graph for each kind of draft and each shape of its inputs.

    They are valid for one model and one KV cache of the head.
    """

    def __init__(self) -> None:
        self._pool: GraphPool | None = None
        self.forget()

    def forget(self) -> None:
        """Drop all graphs."""
        self._holds_for: tuple[Any, Tensor | None] = None, None
        self._captured: dict[Hashable, Captured[Draft]] = {}

    def run(
        self,
        model: nn.Module,
        written: Tensor | None,
        kind: Hashable,
        draft: Callable[[Mapping[str, Tensor]], Draft],
        inputs: Inputs,
    ) -> Draft:
        """What `draft` makes of the inputs. The next draft overwrites it.

        written: the keys that a draft writes to, if it does. kind: all that a draft depends on apart from tensors.
        """
        if self._holds_for[0] != ref(model) or self._holds_for[1] is not written:
            self._holds_for, self._captured = (ref(model), written), {}
            self._pool = find_backend(inputs["roots"].device).make_pool()
        shapes = {name: pad_shape(name, tensor) for name, tensor in inputs.items()}
        key = kind, *shapes.items()
        if key not in self._captured:
            forget_oldest(self._captured)
            buffers = {name: tensor.new_zeros(shapes[name]) for name, tensor in inputs.items()}
            self._captured[key] = Captured(self._pool, buffers)
        return self._captured[key].run(draft, inputs)


def pad_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    """The shape of an input's buffer: the input's own, with padded tokens."""
    if name not in BY_TOKEN:
        return tuple(tensor.shape)
    return len(tensor), pad_tokens(tensor.shape[1]), *tensor.shape[2:]


def pad_tokens(count: int) -> int:
    """The number of tokens, padding included."""
    return round_up(max(count, FEWEST))
