"""Attention of a head's decoder layers, and their KV cache, with a separate length for each row.

`decode.kv_cache` serves all layers of a transformers model and compacts accepted paths; a head has few layers, plain
tensors and no paths to keep. Heads do not import from decode.
Shapes: B rows, Q query heads, G key-value heads, S slots, T tokens, D head size. Token i of a row's text is in slot i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TypeAlias

import torch
from torch import Tensor, nn

GROWTH = 256  # slots; allocation is rounded up to a multiple


# Queries [B, Q, T, D] and new keys and values [B, G, T, D] -> the attention output [B, Q, T, D]. A keyword, `layer`, is
# the number of the layer that calls, 0 by default.
Attend: TypeAlias = Callable[..., Tensor]


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, layer: int = 0) -> Tensor:
    """Grouped-query attention without earlier tokens, the same in all layers.

    mask: what each token attends to, [B, 1, T, S] to add to the scores; None: all up to its own.
    """
    return nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )


class LayerCache:
    """The keys and values of a head's layers for a batch; those of several layers are one after the other in G.

    Text tokens stay only if `keep` counts them: the next call overwrites padding. Draft tokens come with a mask over
    all S slots in use and take its last T, in all rows. They stay until the next text.
    attention: computes attention with an additive mask, as `attend`. window: of `LayerConfig`; the tokens of a draft
    are not hidden from each other.
    """

    def __init__(
        self,
        batch: int,
        attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = attend,
        window: int | None = None,
    ) -> None:
        self.attention, self.window = attention, window
        self.lengths = [0] * batch  # kept tokens of each row
        self._lengths: Tensor | None = None  # the same on the device, while known there
        self._placed: tuple[Tensor, Tensor] | None = None  # these, and the last positions found by them
        # At fixed shape: the first slot that needs a mask, and the end of all that attention sees.
        self.sees: tuple[int, int] | None = None
        # Keys and values once it was written to, each [>= B, G, >= S, D]. They move only to take more memory.
        self.held: tuple[Tensor, Tensor] | None = None

    def at_fixed_shape(self, lengths: Tensor, sees: tuple[int, int]) -> LayerCache:
        """A cache in the same memory, which is never moved; attention sees the same number of slots in each step.

        So a step has the same tensor operations as the last one. lengths [B]: of the rows, on the device. sees: the
        first slot that some tokens may not attend to, and the end of the slots.
        """
        fixed = copy(self)
        fixed._lengths, fixed.sees = lengths, sees
        return fixed

    def restart(self, batch: int) -> None:
        """Begin another batch in the same memory, which is cleared: 0 times a NaN in a hidden slot would be NaN."""
        self.lengths, self._lengths = [0] * batch, None
        if self.held is not None:
            self._hold(self.held, 0, batch)
            for held in self.held:
                held.zero_()

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None = None,
        layer: int = 0,
        slots: slice | None = None,
    ) -> Tensor:
        """Attend to earlier tokens of the layer too, and write the new ones. No gradient flows through them.

        slots: those of draft tokens; None: the last ones that the mask is for.
        """
        heads = heads_of(layer, keys)
        if mask is None:
            used = self.write(keys, values, layer)
            return self._look(queries, self.positions(keys.shape[2], keys.device), used, heads)
        used = mask.shape[3] if self.sees is None else self.sees[1]
        self._store(keys, values, slots or slice(used - keys.shape[2], used), used, heads)
        keys, values = (held[:, heads, :used] for held in self.allocated())
        return self.attention(queries, keys, values, mask)

    def look(self, queries: Tensor) -> Tensor:
        """Attention [B, Q, 1, D] of each row's last kept token, by its queries [B, Q, 1, D]. Writes nothing.

        For layers that all read the same input: queries, keys and values are those of all layers.
        """
        return self._look(queries, self.positions(1, queries.device) - 1, max(self.lengths), slice(None))

    def _look(self, queries: Tensor, positions: Tensor, used: int, heads: slice) -> Tensor:
        """Attention of text tokens at positions [B, T]."""
        mask = self._hide_later(positions, used, queries.dtype)
        keys, values = (held[:, heads, :used] for held in self.allocated())
        return self.attention(queries, keys, values, mask)

    def _hide_later(self, positions: Tensor, used: int, dtype: torch.dtype) -> Tensor:
        """What text tokens at positions [B, T] attend to, [B, 1, T, S]."""
        first = 0 if self.sees is None else self.sees[0]
        slots, own = torch.arange(first, used, device=positions.device), positions[..., None]
        return hide(is_unseen(slots, own, own, self.window), dtype)[:, None]

    def prepare(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Make room for the next text tokens, at positions [B, T], and return their mask [B, 1, T, S].

        For a pass that writes them itself, see `HeadPass`, to a cache that was written to.
        """
        used = max(self.lengths) + positions.shape[1]
        self.reserve(used)
        return self._hide_later(positions, used, dtype)

    def write(self, keys: Tensor, values: Tensor, layer: int = 0) -> int:
        """Write those of the next text tokens: of one layer, or as layer 0 those of all. Returns the slots in use."""
        count, longest = keys.shape[2], max(self.lengths)
        used = longest + count if self.sees is None else self.sees[1]
        is_even = self.sees is None and min(self.lengths) == longest
        slots = slice(longest, used) if is_even else self.positions(count, keys.device)
        self._store(keys, values, slots, used, heads_of(layer, keys))
        return used

    def _store(self, keys: Tensor, values: Tensor, slots: slice | Tensor, used: int, heads: slice) -> None:
        new = keys.detach(), values.detach()
        self._hold(self.held or new, used, len(keys), heads.stop)
        for held, each in zip(self.allocated(), new, strict=True):
            part = held[:, heads]  # [B, G, S, D]
            if isinstance(slots, slice):
                part[:, :, slots] = each
            else:  # [B, T]
                part[torch.arange(len(each), device=each.device)[:, None], :, slots] = each.transpose(1, 2)

    def reserve(self, slots: int) -> None:
        """Make room for so many slots. For a cache that was written to."""
        self._hold(self.allocated(), slots, len(self.lengths))

    def allocated(self) -> tuple[Tensor, Tensor]:
        """The rows' keys and values in all slots. For a cache that was written to."""
        assert self.held is not None
        keys, values = self.held
        return keys[: len(self.lengths)], values[: len(self.lengths)]

    def lengths_on(self, device: torch.device) -> Tensor:
        """The lengths [B] as a tensor."""
        if self._lengths is None:
            self._lengths = torch.tensor(self.lengths).to(device, non_blocking=True)
        return self._lengths

    def positions(self, count: int, device: torch.device) -> Tensor:
        """The positions [B, T] of the next `count` text tokens, which are also their slots."""
        lengths = self.lengths_on(device)
        if self._placed is None or self._placed[0] is not lengths or self._placed[1].shape[1] != count:
            self._placed = lengths, lengths[:, None] + torch.arange(count, device=device)
        return self._placed[1]

    def text_mask(self, device: torch.device, dtype: torch.dtype, window: int | None, count: int) -> Tensor:
        """What `count` draft tokens attend to before drafted ones: the row's text, or what their windows have of it.

        Returns [B, T, S] to add to the scores.
        """
        slots, own = torch.arange(max(self.lengths), device=device), self.positions(count, device)[..., None]
        return hide(is_unseen(slots, own[:, :1] - 1, own, window), dtype).expand(-1, count, -1)

    def keep(self, counts: Sequence[int], on_device: Tensor | None = None) -> None:
        """Keep the first counts[b] of the text tokens written last. on_device: the counts [B], if they are there."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._lengths = None if self._lengths is None or on_device is None else self._lengths + on_device

    def crop(self, lengths: Sequence[int]) -> None:
        """Drop tokens beyond these lengths."""
        self._lengths = None
        self.lengths = [min(pair) for pair in zip(self.lengths, lengths, strict=True)]

    def add_rows(self, count: int) -> None:
        """Add empty rows after these."""
        self.lengths, self._lengths = [*self.lengths, *[0] * count], None
        if self.held is not None:
            self._hold(self.held, 0, len(self.lengths))
            for held in self.allocated():
                held[len(self.lengths) - count :].zero_()

    def fill(self, rows: Sequence[int], other: LayerCache) -> None:
        """Fill empty rows with those of another cache that was written to, in order."""
        new, self._lengths = other.allocated(), None
        self._hold(self.held or new, new[0].shape[2], len(self.lengths))
        for held, each in zip(self.allocated(), new, strict=True):
            held[list(rows), :, : each.shape[2]] = each
        for row, length in zip(rows, other.lengths, strict=True):
            self.lengths[row] = length

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""
        moves = [(place, row, self.lengths[row]) for place, row in enumerate(rows) if place != row]
        if self.held is not None and moves:
            moved = [[held[row, :, :length].clone() for _, row, length in moves] for held in self.held]
            self._hold(self.held, 0, len(rows))
            for held, parts in zip(self.held, moved, strict=True):
                for (place, _, length), part in zip(moves, parts, strict=True):
                    held[place, :, :length] = part
                    held[place, :, length:] = 0  # a NaN of the row before would be seen: 0 times it is NaN
        self._lengths, self.lengths = None, [self.lengths[row] for row in rows]

    def _hold(self, like: tuple[Tensor, Tensor], slots: int, rows: int, heads: int = 0) -> None:
        """Make room for so many slots, rows and key-value heads of keys and values like these."""
        held = self.held or (like[0].new_zeros(0, *like[0].shape[1:]), like[1].new_zeros(0, *like[1].shape[1:]))
        have_rows, have_heads, have_slots = held[0].shape[:3]
        if rows > have_rows or slots > have_slots or heads > have_heads or self.held is None:
            rows = max(rows, 2 * have_rows) if rows > have_rows else have_rows
            if slots > have_slots:
                slots = -(-max(slots, have_slots * 3 // 2) // GROWTH) * GROWTH
            more = 0, 0, 0, max(slots - have_slots, 0), 0, max(heads - have_heads, 0), 0, rows - have_rows
            self.held = nn.functional.pad(held[0], more), nn.functional.pad(held[1], more)


def heads_of(layer: int, keys: Tensor) -> slice:
    """Which key-value heads of a cache are a layer's, by its keys [B, G, T, D]."""
    count = keys.shape[1]
    return slice(layer * count, (layer + 1) * count)


def is_unseen(slots: Tensor, last: Tensor, own: Tensor, window: int | None) -> Tensor:
    """Whether a token at its `own` position, which may see a text up to `last`, does not see the text's `slots`."""
    later = slots > last
    return later if window is None else later | (slots <= own - window)


def hide(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that hides what is true in `hidden`, to add to scores of this dtype."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
