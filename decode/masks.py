"""Attention masks for trees: every node sees the committed tokens and its own ancestors, within its layer's window.

Shapes: B rows, N new nodes, M nodes of the tree so far (the new ones are the last N), S slots of the KV cache.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True)
class AttentionWindow:
    """How far back a layer looks: everything, the last `window` positions, or its own chunk of `chunk` positions."""

    window: int | None = None
    chunk: int | None = None


def attention_windows(model: PreTrainedModel) -> dict[str, AttentionWindow]:
    """The reach of each layer type of a model.

    Raises ValueError for types that cannot be verified as a tree (recurrent and linear attention, convolutions) and
    for windows that no mask by layer type can express.
    """
    config = model.config.get_text_config(decoder=True)
    window = _common_window(config)
    known = {
        FULL: AttentionWindow(),
        SLIDING: AttentionWindow(window=window),
        CHUNKED: AttentionWindow(chunk=getattr(config, "attention_chunk_size", None)),
    }
    types = getattr(config, "layer_types", None)
    if types is None:
        _refuse_ignored_window(model, window)
        return {FULL: AttentionWindow(window=window)}
    strange = sorted(set(types) - set(known))
    if strange:
        raise ValueError(
            f"{config.model_type} has layers of type {', '.join(strange)}, whose state cannot branch into a tree; "
            f"only attention layers ({', '.join(known)}) can be verified"
        )
    return {kind: known[kind] for kind in sorted(set(types))}


def _common_window(config: PretrainedConfig) -> int | None:
    """The window of all windowed layers; None where there is none, or none shorter than the context."""
    if getattr(config, "is_heterogeneous", False):
        windows = {getattr(layer, "sliding_window", None) for layer in config.per_layer_config}
        if len(windows) > 1:
            raise ValueError(
                f"{config.model_type} has layers with different windows; one mask a layer type is not enough"
            )
    window = getattr(config, "sliding_window", None) or 0  # some models write 0 for none
    return window if 0 < window < (getattr(config, "max_position_embeddings", None) or 1 << 30) else None


def _refuse_ignored_window(model: PreTrainedModel, window: int | None) -> None:
    """Raise ValueError where a model's code has no windows but its configuration has, copied from another model.

    transformers then contradicts itself: `generate` drops what has left the window, `forward` still sees it.
    """
    code = sys.modules[type(model.get_decoder()).__module__]
    if window is not None and not hasattr(code, "create_sliding_window_causal_mask"):
        name = model.config.get_text_config(decoder=True).model_type
        raise ValueError(
            f"{name} has no windows, but its configuration has sliding_window={window}; "
            "set model.config.sliding_window = None"
        )


def tree_masks(
    reaches: dict[str, AttentionWindow],
    lengths: Tensor,
    ancestors: Tensor,
    depth: Tensor,
    used: int,
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor]:
    """Additive masks [B, 1, N, S]: 0 where a node may look, the lowest number of `dtype` elsewhere.

    lengths [B], ancestors [B, N, M], depth [B, M]. One mask for a model with one kind of layer, else one per layer
    type. Windows are measured in positions: a slot's number says nothing about a tree node's position. The masks are
    additive because eager attention adds whatever it gets, and a boolean mask added is silently wrong.
    """
    nodes, new = depth.shape[1], ancestors.shape[1]
    slot = torch.arange(used, device=lengths.device)
    node = slot - lengths[:, None]  # [B, S]; the tree node in a slot, negative where a committed token lies
    inside = (node >= 0) & (node < nodes)
    index = node.clamp(0, nodes - 1)
    visible = ancestors.gather(2, index[:, None].expand(-1, new, -1)) & inside[:, None] | (node < 0)[:, None]
    key_at = torch.where(inside, lengths[:, None] + depth.gather(1, index), slot)[:, None]  # [B, 1, S]
    query_at = (lengths[:, None] + depth[:, nodes - new :])[:, :, None]  # [B, N, 1]
    masks = {}
    for kind, reach in reaches.items():
        allowed = visible
        if reach.window is not None:
            allowed = allowed & (query_at - key_at < reach.window)
        if reach.chunk is not None:
            allowed = allowed & (query_at // reach.chunk == key_at // reach.chunk)
        lowest = torch.finfo(dtype).min
        masks[kind] = torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, lowest)[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))
