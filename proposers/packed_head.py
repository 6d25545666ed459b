"""Heads made fast: packed linear layers on a CPU, merged ones on a GPU, and the target's attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from decode.cpu.packed_linear import PackedLinear, can_pack, make_linear, merge_layers, pack_layers
from decode.models.grouped_attention import attend_grouped
from heads.vocabulary import VocabularyHead


def attend_like_target(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """`heads.layer_cache.attend` as the target computes it. The mask is in the queries' dtype."""
    return attend_grouped(queries, keys, values, mask, queries.shape[3] ** -0.5).transpose(1, 2)


def pack_head(head: VocabularyHead) -> Any:
    """A copy of the head with packed or merged layers, for inference only. The head itself stays as it is.

    All other tensors are shared with the head.
    """
    tensors = [*head.parameters(), *head.buffers()]
    packed: Any = copy.deepcopy(head, {id(tensor): tensor for tensor in tensors})
    packed.logits = PackedOutput(head, packed.normalise)
    for name in ("lm_head", "lm_heads"):
        if hasattr(packed, name):
            delattr(packed, name)  # the packed output layer replaces it
    merge_layers(packed, lambda layer: type(layer) is nn.Linear and layer.weight.device.type == "cuda")
    pack_layers(packed)
    return packed


class PackedOutput:
    """A head's `logits`, with output layers that are packed where there is a kernel for it."""

    def __init__(self, head: VocabularyHead, normalise: Callable[[Tensor], Tensor]) -> None:
        self.normalise, self.device = normalise, next(head.parameters()).device
        count = head.config.heads if head.output == "own" else 1
        layers = [make_linear(*head.output_layer(index)) for index in range(count)]
        self.layers = [PackedLinear(layer) if can_pack(layer) else layer for layer in layers]

    def __call__(self, states: Tensor, index: int = 0) -> Tensor:
        return self.layers[index % len(self.layers)](self.normalise(states))
