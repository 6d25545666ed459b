"""Attention masks for trees: a node sees the committed tokens and its ancestors, within its layer's attention window.

Shapes: B rows, M nodes of a tree, N new nodes (its last ones), S slots of the KV cache.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from decode.gpu.fusion import fused

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True)
class AttentionWindow:
    """What a layer attends to: everything, the last `window` positions, or its own chunk of `chunk` positions."""

    window: int | None = None
    chunk: int | None = None


def attention_windows(model: PreTrainedModel) -> dict[str, AttentionWindow]:
    """The attention window of each layer type of a model.

    Raises ValueError for layer types that cannot verify a tree (recurrent layers, linear attention, convolutions) and
    for windows that differ within a layer type.
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
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise ValueError(
            f"{config.model_type} has layers of type {', '.join(unknown)}, whose state cannot branch into a tree; "
            f"only attention layers ({', '.join(known)}) can be verified"
        )
    return {kind: known[kind] for kind in sorted(set(types))}


def _common_window(config: PretrainedConfig) -> int | None:
    """The window that all windowed layers share; None if there is none, or none shorter than the context."""
    if getattr(config, "is_heterogeneous", False):
        windows = {getattr(layer, "sliding_window", None) for layer in config.per_layer_config}
        if len(windows) > 1:
            raise ValueError(f"{config.model_type} has layers with different windows; one mask per layer type is made")
    window = getattr(config, "sliding_window", None) or 0  # some configs write 0 for none
    return window if 0 < window < (getattr(config, "max_position_embeddings", None) or 1 << 30) else None


def _refuse_ignored_window(model: PreTrainedModel, window: int | None) -> None:
    """Raise ValueError if a model's config has a window, copied from another model, that its code does not apply.

    transformers then contradicts itself: `generate` drops tokens outside the window, `forward` attends to them.
    """
    code = sys.modules[type(model.get_decoder()).__module__]
    if window is not None and not hasattr(code, "create_sliding_window_causal_mask"):
        name = model.config.get_text_config(decoder=True).model_type
        raise ValueError(
            f"{name} has no windows, but its configuration has sliding_window={window}; "
            "set model.config.sliding_window = None"
        )


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
