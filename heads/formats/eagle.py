"""EAGLE-1 heads as published (EAGLE-2 and HASS use the same format), and as servers load them.

A published folder has a copy of the target's embeddings and a copy of its config with a few changes. Its
`num_hidden_layers` and `num_key_value_heads` are often wrong, and a missing `bias` means true.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.eagle import EagleConfig, EagleHead
from heads.formats.decoder_layer import export_layer, read_layer
from heads.formats.layout import MAP, OWN, ConfigDict, Layout, Shapes, extent, read_target, read_vocab_size, section

LAYER = "layers.0."
EMBEDDING = "embed_tokens.weight"


def read_eagle(shapes: Shapes, config: ConfigDict, vocab_size: int | None) -> Layout | None:
    """The layout of an EAGLE-1 head; None if the file has no such layer. Check for EAGLE-3 names first."""
    if "fc.weight" not in shapes or not any(name.startswith(f"{LAYER}self_attn.") for name in shapes):
        return None
    own = section(config, OWN)
    hidden_size = extent(shapes, ["fc.weight"], 0)
    bias = bool(own.get("bias") if own else "fc.bias" in shapes or config.get("bias", True))
    if bias and "fc.bias" not in shapes:
        raise ValueError("missing: fc.bias, which is required unless its config has bias: false")
    head_config = EagleConfig(
        hidden_size=hidden_size,
        vocab_size=find_vocab_size(shapes, config, vocab_size, hidden_size),
        layer=read_layer(shapes, LAYER, config),
        draft_size=extent(shapes, [MAP], 0) if MAP in shapes else None,
        bias=bias,
        **read_target(config),
    )
    return Layout.of(head_config, ignored={EMBEDDING, *(["fc.bias"] if own and not bias else [])})


def find_vocab_size(shapes: Shapes, config: ConfigDict, given: int | None, width: int) -> int:
    """The target's vocabulary size. Raises ValueError if it is unknown, or if the embeddings have another width."""
    if EMBEDDING in shapes:
        rows = extent(shapes, [EMBEDDING], 0)
        if tuple(shapes[EMBEDDING]) != (rows, width):
            raise ValueError(f"wrong: {EMBEDDING} is {list(shapes[EMBEDDING])}, not {[rows, width]}")
        return rows
    return extent(shapes, ["t2d"], 0, 0) or read_vocab_size(config, given)


def export_eagle(head: EagleHead) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a folder for vLLM and SGLang; neither accepts an output matrix.

    SGLang finds its class by the first architecture, vLLM by "Eagle" + the second. SGLang needs a bias and gets zeros.
    vLLM would ignore a bias silently, so a head that has one does not name vLLM's class. The token map is in our
    section of the config, which servers do not read.
    """
    states, config = head.state_dict(), head.config
    tokens = {MAP: states.pop(MAP).tolist()} if MAP in states else {}
    states.setdefault("fc.bias", torch.zeros(config.hidden_size, dtype=head.fc.weight.dtype))
    return states, export_layer(config) | {
        "architectures": ["LlamaForCausalLMEagle", *([] if config.bias else ["LlamaForCausalLM"])],
        "attention_bias": False,  # true would mean a bias of o_proj too
        "qkv_bias": config.layer.qkv_bias,
        OWN: tokens,
    }
