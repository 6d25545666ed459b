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
from heads.formats.layout import EMBEDDING, MAP, OWN, ConfigDict, Layout, Shapes, extent, read_common

LAYER = "layers.0."


def read_eagle(shapes: Shapes, config: ConfigDict, vocab_size: int | None) -> Layout | None:
    """The layout of an EAGLE-1 head; None if the file has no such layer. Check for EAGLE-3 names first."""
    if "fc.weight" not in shapes or not any(name.startswith(f"{LAYER}self_attn.") for name in shapes):
        return None
    bias = "fc.bias" in shapes or bool(config.get("bias", True))
    if bias and "fc.bias" not in shapes:
        raise ValueError("missing: fc.bias, which is required unless its config has bias: false")
    head_config = EagleConfig(
        **read_common(shapes, extent(shapes, ["fc.weight"], 0), [], config, vocab_size),
        layer=read_layer(shapes, LAYER, config),
        bias=bias,
    )
    return Layout(head_config, ignored={EMBEDDING})


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
