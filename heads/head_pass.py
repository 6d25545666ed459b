"""A pass of an EAGLE head as a function of tensors alone, so that a device can compile it.

Shapes: B rows, T tokens, S slots that the pass sees, C slots that the cache has, G key-value heads, D head size, H
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from heads.layer_cache import hide


class HeadPass(nn.Module):
    """A pass of a head with one decoder layer. attention: as in `LayerCache`."""

    # Of the inputs: sizes that differ between passes in upper case, those of the head in lower case.
    dimensions = "BTh", "BTh", "BT", "d", "B1TS", "BT", "BgCd", "BgCd"

    def __init__(self, head: Any, attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.attention = head, attention

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        positions: Tensor,
        frequencies: Tensor,
        mask: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """States [B, T, H], as the head computes them, for tokens at positions [B, T].

        frequencies [D]: of rotary positions. mask [B, 1, T, S]: to add to the scores. slots [B, T]: of the cache's keys
        and values [B, G, C, D], which the pass writes to.
        """
        rows, used = torch.arange(slots.shape[0], device=slots.device)[:, None], mask.shape[3]

        def attend(queries: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
            keys[rows, :, slots], values[rows, :, slots] = new_keys.transpose(1, 2), new_values.transpose(1, 2)
            return self.attention(queries, keys[:, :, :used], values[:, :, :used], mask)

        table = self.head.config.layer.rotary_table(positions, embedded.dtype, frequencies)
        states: Tensor = self.head(embedded, features, table, attend)
        return states

    def make_example(self, dtype: torch.dtype) -> list[Tensor]:
        """Inputs of a pass, whose sizes all differ. Each token sees other slots."""
        generator, layer, used = torch.Generator().manual_seed(0), self.head.config.layer, 77
        sizes = {"B": 2, "T": 5, "S": used, "C": 130, "h": self.head.hidden_size, "1": 1}
        sizes |= {"d": layer.head_dim, "g": layer.num_key_value_heads}
        shapes = [[sizes[size] for size in each] for each in self.dimensions]
        inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        inputs[2] = torch.arange(used - sizes["T"], used).expand(sizes["B"], -1).contiguous()
        inputs[3] = layer.frequencies(dtype, inputs[0].device)[0]
        inputs[4] = hide(inputs[4] > 1, dtype)
        inputs[5] = inputs[2].clone()
        return inputs
