"""Drafting as a CUDA graph: what a head does in a step, on tensors that stay where they are.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias
from weakref import ref

from torch import Tensor, nn

from decode.gpu.fixed_cache import round_up
from decode.gpu.graph import Captured, GraphPool, make_pool
from proposers.trees.candidates import BestTree

Inputs: TypeAlias = dict[str, Tensor]  # what a draft depends on, by name
BY_TOKEN = ("features", "following")  # inputs [B, T, ...], whose tokens are padded at the right
FEWEST = 8  # tokens of an input; fewer take as long


class DraftGraphs:
    """A graph for each shape of inputs and each kind of draft.

    They are valid for one model, one number of rows and one KV cache of the head.
    """

    def __init__(self) -> None:
        self._holds_for: tuple[Any, int, Tensor | None] = None, 0, None
        self._captured: dict[Hashable, Captured[BestTree]] = {}
        self._pool: GraphPool | None = None

    def run(
        self,
        model: nn.Module,
        written: Tensor | None,
        kind: Hashable,
        draft: Callable[[Mapping[str, Tensor]], BestTree],
        inputs: Inputs,
    ) -> BestTree:
        """What `draft` makes of the inputs. The next draft overwrites it.

        written: the keys that a draft writes to, if it does. kind: all that a draft depends on apart from tensors.
        """
        holds_for = ref(model), len(inputs["roots"]), written
        if self._holds_for[:2] != holds_for[:2] or self._holds_for[2] is not written:
            self._holds_for, self._captured = holds_for, {}
            self._pool = make_pool(inputs["roots"].device)
        shapes = {name: pad_shape(name, tensor) for name, tensor in inputs.items()}
        key = kind, *shapes.items()
        if key not in self._captured:
            buffers = {name: tensor.new_zeros(shapes[name]) for name, tensor in inputs.items()}
            self._captured[key] = Captured(self._pool, buffers)
        return self._captured[key].run(draft, inputs)


def pad_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    """An input's shape, with padding."""
    if name not in BY_TOKEN:
        return tuple(tensor.shape)
    return len(tensor), pad_tokens(tensor.shape[1]), *tensor.shape[2:]


def pad_tokens(count: int) -> int:
    """So many tokens and their padding."""
    return round_up(max(count, FEWEST))
