"""What the layers of a stock model attend to: everything, a sliding window or a chunk."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedModel

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
