"""The KV cache for steps of fixed shape: nothing in a step depends on how many tokens are committed.

Shapes: B rows, N nodes, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.kv_cache import TreeCache

MOST_KEPT = 4096  # slots of a row: a larger KV cache is not kept for the next batch, whose attention would see them all


class FixedCache(TreeCache):
    """A `TreeCache` with more rows than needed, whose slots are chosen on the device. Attention sees all of them."""

    @torch.inference_mode()  # the cache was made in it
    def restart(self, batch: int) -> None:
        """Forget all tokens. Memory stays where it is, and is cleared: 0 times a NaN in a hidden slot would be NaN."""
        self.lengths = [0] * batch
        for block in self.blocks:
            block.clear()

    def round_rows(self, rows: int) -> int:
        return round_up(rows)

    def make_room(self, nodes: int) -> None:
        """Allocate slots for so many nodes of each row. Keys and values move in memory only if that takes more."""
        self.grow(max(self.lengths) + nodes)
        self.used = self.capacity

    def place(self, lengths: Tensor, nodes: int) -> None:
        """Reserve the slots of so many nodes after the committed tokens, `lengths` [B]."""
        self.slots = self.node_slots = lengths[:, None] + torch.arange(nodes, device=lengths.device)

    def compact(self, on_path: Tensor) -> None:
        """Move the nodes on each row's path, [B, N] bool, to the row's first node slots."""
        node = torch.arange(on_path.shape[1], device=on_path.device)
        path = on_path.int().sort(dim=1, descending=True, stable=True).indices
        source = torch.where(node < on_path.sum(dim=1, keepdim=True), path, node)  # [B, N]
        self.move(torch.stack([self.node_slots.gather(1, source), self.node_slots]))


def round_up(count: int) -> int:
    """The next power of two: rows and nodes are padded to it, so that steps have few different shapes."""
    return 1 << (count - 1).bit_length()
