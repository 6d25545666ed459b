"""Attention masks for trees: a node sees the committed tokens and its ancestors, within its layer's attention window.

Shapes: B rows, M nodes of a tree, N new nodes (its last ones), S slots of the KV cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.models.compatibility import AttentionWindow


def tree_masks(
    windows: dict[str, AttentionWindow],
    lengths: Tensor,
    ancestors: Tensor | None,
    depth: Tensor,
    used: int,
    dtype: torch.dtype,
    seen: int = 0,
) -> Tensor | dict[str, Tensor]:
    """Additive masks [B, 1, N, S]: 0 where a node attends, the lowest number of `dtype` elsewhere.

    lengths [B]: committed tokens; ancestors [B, N, M], or None for chains; depth [B, M], of chains [B, N]; used: S. One
    mask for a model with one layer type, else one per type. Windows count positions, which for tree nodes are not the
    slots. A boolean mask would be silently wrong: eager attention adds its mask. Padding nodes attend to themselves,
    those of chains also to what is before.
    seen: full attention sees so many slots, the first ones, without a mask; its masks are [B, 1, N, S - seen].
    """
    new = depth.shape[1] if ancestors is None else ancestors.shape[1]
    query_position = (lengths[:, None] + depth[:, depth.shape[1] - new :])[:, :, None]  # [B, N, 1]
    known: dict[int, tuple[Tensor, Tensor]] = {}  # by the first slot
    masks = {}
    for layer_type, span in windows.items():
        begin = seen if span.is_full else 0
        if begin not in known:
            slot = torch.arange(begin, used, device=lengths.device)
            known[begin] = _find_visible(slot, lengths, ancestors, depth, query_position)
        allowed, key_position = known[begin]
        if span.window is not None:
            allowed = allowed & (query_position - key_position < span.window)
        if span.chunk is not None:
            allowed = allowed & (query_position // span.chunk == key_position // span.chunk)
        lowest = torch.finfo(dtype).min
        masks[layer_type] = torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, lowest)[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _find_visible(
    slot: Tensor, lengths: Tensor, ancestors: Tensor | None, depth: Tensor, query_position: Tensor
) -> tuple[Tensor, Tensor]:
    """Whether a node sees each slot [B, N, S], and the positions in these slots, [S] or [B, 1, S]."""
    if ancestors is None:  # a slot is a position
        return slot <= query_position, slot
    nodes, new = depth.shape[1], ancestors.shape[1]
    node = slot - lengths[:, None]  # [B, S] the node in a slot; negative for committed tokens
    in_tree = (node >= 0) & (node < nodes)
    index = node.clamp(0, nodes - 1)
    visible = ancestors.gather(2, index[:, None].expand(-1, new, -1)) & in_tree[:, None] | (node < 0)[:, None]
    return visible, torch.where(in_tree, lengths[:, None] + depth.gather(1, index), slot)[:, None]
