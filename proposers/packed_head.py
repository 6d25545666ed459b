"""Heads made fast on a CPU, as `decode.cpu.acceleration` does it for models.

Shapes: D draft vocabulary, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from torch import Tensor

from decode.cpu.packed_linear import PackedLinear, can_pack, make_linear, pack_layers
from heads.vocabulary import VocabularyHead

Head = TypeVar("Head", bound=VocabularyHead)
Logits: TypeAlias = Callable[[Tensor, int], Tensor]  # states [..., H] of a head, and its number, to logits [..., D]


def pack_head(head: Head) -> tuple[Head, Logits]:
    """A copy of the head with packed layers, for inference only, and what takes the place of its `logits`.

    Tensors that cannot be packed are shared with the head, which stays as it is.
    """
    tensors = [*head.parameters(), *head.buffers()]
    packed = copy.deepcopy(head, {id(tensor): tensor for tensor in tensors})
    readout = Readout(head, packed.normalise)
    for name in ("lm_head", "lm_heads"):
        if hasattr(packed, name):
            delattr(packed, name)  # the readout has it
    pack_layers(packed)
    return packed, readout


class Readout:
    """A head's logits, by matrices that are packed where there is a kernel for it."""

    def __init__(self, head: VocabularyHead, normalise: Callable[[Tensor], Tensor]) -> None:
        self.normalise, self.device = normalise, next(head.parameters()).device
        several = head.config.heads if head.output == "own" else 1
        layers = [make_linear(*head.output_layer(index)) for index in range(several)]
        self.matrices = [PackedLinear(layer) if can_pack(layer) else layer for layer in layers]

    def __call__(self, states: Tensor, index: int) -> Tensor:
        return self.matrices[index % len(self.matrices)](self.normalise(states))
