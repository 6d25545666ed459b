"""Attention masks for trees: a node sees the committed tokens and its ancestors, within its layer's attention window.

Shapes: B rows, M nodes of a tree, N new nodes (its last ones), S slots of the KV cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.device.fusion import fused
from decode.models.compatibility import AttentionWindow


@fused
def tree_masks(
    windows: dict[str, AttentionWindow],
    lengths: Tensor,
    ancestors: Tensor | None,
    depth: Tensor,
    used: int,
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor]:
    """Additive masks [B, 1, N, S]: 0 where a node attends, the lowest number of `dtype` elsewhere.

    lengths [B]: committed tokens; ancestors [B, N, M], or None for chains; depth [B, M], of chains [B, N]; used: S. One
    mask for a model with one layer type, else one per type. Windows count positions, which for tree nodes are not the
    slots. A boolean mask would be silently wrong: eager attention adds its mask. Padding nodes attend to themselves,
    those of chains also to what is before.
    """
    nodes = depth.shape[1]
    new = nodes if ancestors is None else ancestors.shape[1]
    slot = torch.arange(used, device=lengths.device)
    query_position = (lengths[:, None] + depth[:, nodes - new :])[:, :, None]  # [B, N, 1]
    if ancestors is None:  # a slot is a position
        key_position: Tensor = slot
        visible = slot <= query_position
    else:
        node = slot - lengths[:, None]  # [B, S] the node in a slot; negative for committed tokens
        in_tree = (node >= 0) & (node < nodes)
        index = node.clamp(0, nodes - 1)
        visible = ancestors.gather(2, index[:, None].expand(-1, new, -1)) & in_tree[:, None] | (node < 0)[:, None]
        key_position = torch.where(in_tree, lengths[:, None] + depth.gather(1, index), slot)[:, None]  # [B, 1, S]
    masks = {}
    for layer_type, span in windows.items():
        allowed = visible
        if span.window is not None:
            allowed = allowed & (query_position - key_position < span.window)
        if span.chunk is not None:
            allowed = allowed & (query_position // span.chunk == key_position // span.chunk)
        lowest = torch.finfo(dtype).min
        masks[layer_type] = torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, lowest)[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))
