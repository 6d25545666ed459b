"""Attention of a head's decoder layer, and its KV cache, with a separate length for each row.

`decode.kv_cache` serves all layers of a transformers model and compacts accepted paths; a head has one layer, plain
tensors and no paths to keep. Heads do not import from decode.
Shapes: B rows, Q query heads, G key-value heads, S slots, T tokens, D head size. Token i of a row is in slot i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

GROWTH = 256  # slots; allocation is rounded up to a multiple


class AttentionContext(Protocol):
    """Earlier tokens that new tokens attend to."""

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Queries [B, Q, T, D] and new keys and values [B, G, T, D] -> the attention output [B, Q, T, D].

        mask: bool [B, 1, T, S], the slots that each token attends to; None: all up to its own.
        """


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Grouped-query attention as in `AttentionContext`, without earlier tokens."""
    if mask is None or queries.dtype != torch.bfloat16 or queries.device.type != "cpu":
        return nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
    # torch's grouped bfloat16 kernel on a CPU takes up to 5 times as long as folding groups into the token axis.
    groups = queries.shape[1] // keys.shape[1]
    folded = queries.unflatten(1, (keys.shape[1], groups)).flatten(2, 3)  # [B, G, groups x T, D]
    mixed = nn.functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask.repeat(1, 1, groups, 1))
    return mixed.unflatten(2, (groups, -1)).flatten(1, 2)


class LayerCache:
    """The keys and values of one layer for a batch; an `AttentionContext`.

    New tokens stay only if `keep` counts them: the next call overwrites padding and rejected draft tokens.
    """

    def __init__(self, batch: int) -> None:
        self.lengths = [0] * batch  # kept tokens of each row
        self.keys: Tensor | None = None  # [B, G, S, D]
        self.values: Tensor | None = None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend as in `AttentionContext`. Writes the tokens after the kept ones; no gradient flows through them."""
        used = max(self.lengths) + keys.shape[2]
        slots = self.positions(keys.shape[2], keys.device)
        if mask is None:
            mask = (torch.arange(used, device=keys.device) <= slots[..., None])[:, None]
        self.keys, self.values = (
            _write(held, new.detach(), slots, used) for held, new in ((self.keys, keys), (self.values, values))
        )
        return attend(queries, self.keys[:, :, :used], self.values[:, :, :used], mask)

    def positions(self, count: int, device: torch.device) -> Tensor:
        """The positions [B, T] of the next `count` tokens, which are also their slots."""
        return torch.tensor(self.lengths).to(device, non_blocking=True)[:, None] + torch.arange(count, device=device)

    def keep(self, counts: Sequence[int]) -> None:
        """Keep the first counts[b] of the tokens written last."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def crop(self, lengths: Sequence[int]) -> None:
        """Drop tokens beyond these lengths."""
        self.lengths = [min(pair) for pair in zip(self.lengths, lengths, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[list(rows)], self.values[list(rows)]


def _write(held: Tensor | None, new: Tensor, slots: Tensor, used: int) -> Tensor:
    """Write new keys or values [B, G, T, D] at slots [B, T]; reallocate if fewer than `used` slots are held."""
    held = new[:, :, :0] if held is None else held
    size = held.shape[2]
    if size < used:
        capacity = -(-max(used, size * 3 // 2) // GROWTH) * GROWTH
        held = nn.functional.pad(held, (0, 0, 0, capacity - size))
    rows = torch.arange(len(new), device=new.device)[:, None]
    held[rows, :, slots] = new.transpose(1, 2)
    return held
