"""What a head's decoder layer looks back on: the tokens themselves, or a cache, a length of its own for each row.

Shapes: B rows, Q query heads, G key-value heads, S slots, T tokens, D head size. Token i of a row lies in slot i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

GROWTH = 256  # slots; allocation is rounded up to a multiple


class Context(Protocol):
    """What tokens look back on beside themselves."""

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """What tokens with these queries [B, Q, T, D], keys and values [B, G, T, D] see, mixed: [B, Q, T, D].

        mask: bool [B, 1, T, S], the slots that each token sees; None: all up to its own.
        """
        ...


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """As in `Context`, of tokens that have nothing before them."""
    if mask is not None and queries.dtype == torch.bfloat16 and queries.device.type == "cpu":
        return _attend_folded(queries, keys, values, mask)
    return nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )


def _attend_folded(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The queries of a key-value head lie below one another, as if they were more tokens.

    In bfloat16 on a CPU, torch's own kernel for grouped queries takes up to 5 times as long, most with few tokens.
    """
    groups = queries.shape[1] // keys.shape[1]
    folded = queries.unflatten(1, (keys.shape[1], groups)).flatten(2, 3)  # [B, G, groups x T, D]
    mixed = nn.functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask.repeat(1, 1, groups, 1))
    return mixed.unflatten(2, (groups, -1)).flatten(1, 2)


class LayerCache:
    """The keys and values that one layer keeps of a batch, preallocated.

    New tokens lie behind the kept ones, until `keep` counts them in. So the padding of rows that keep fewer tokens, and
    tokens that were only tried, are written over by the next.
    """

    def __init__(self, batch: int) -> None:
        self.lengths = [0] * batch  # kept tokens of each row
        self.keys: Tensor | None = None  # [B, G, S, D]
        self.values: Tensor | None = None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """See `Context`. The tokens are laid behind those kept, and it is the caller's to `keep` them."""
        mask = self.mask(queries.shape[2], queries.device) if mask is None else mask
        return attend(queries, *self.write(keys, values), mask)

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Lay new ones, [B, G, T, D] each, behind those kept, and return all that are in use, [B, G, S, D] each.

        No gradient flows back through it.
        """
        count = keys.shape[2]
        used = max(self.lengths) + count
        slots = self.positions(count, keys.device)
        self.keys, self.values = (
            self._lay(old, new.detach(), slots, used) for old, new in ((self.keys, keys), (self.values, values))
        )
        return self.keys[:, :, :used], self.values[:, :, :used]

    def positions(self, count: int, device: torch.device) -> Tensor:
        """The positions [B, T] of the next `count` tokens, the same as their slots."""
        return torch.tensor(self.lengths).to(device, non_blocking=True)[:, None] + torch.arange(count, device=device)

    def mask(self, count: int, device: torch.device) -> Tensor:
        """The slots that each of the next `count` tokens sees, those up to its own: bool [B, 1, T, S]."""
        slots = torch.arange(max(self.lengths) + count, device=device)
        return (slots <= self.positions(count, device)[..., None])[:, None]

    def keep(self, counts: Sequence[int]) -> None:
        """Count in the first counts[b] tokens of those written last."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def crop(self, lengths: Sequence[int]) -> None:
        """Forget what was kept beyond the given lengths."""
        self.lengths = [min(pair) for pair in zip(self.lengths, lengths, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, by their places in the batch."""
        self.lengths = [self.lengths[row] for row in rows]
        if self.keys is not None and self.values is not None:
            index = torch.tensor(rows, device=self.keys.device)
            self.keys, self.values = self.keys[index], self.values[index]

    def _lay(self, old: Tensor | None, new: Tensor, slots: Tensor, used: int) -> Tensor:
        if old is None or old.shape[2] < used:
            before = 0 if old is None else old.shape[2]
            capacity = -(-max(used, before * 3 // 2) // GROWTH) * GROWTH
            larger = new.new_zeros(*new.shape[:2], capacity, new.shape[3])
            if old is not None:
                larger[:, :, :before] = old
            old = larger
        rows = torch.arange(len(new), device=new.device)[:, None]
        old[rows, :, slots] = new.transpose(1, 2)
        return old
