"""Attention on a CPU: the project's own op, where it can be compiled.

Shapes: B rows, N nodes, S slots of the KV cache, D head size; heads share the keys and values of their group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from decode.cpu.native_ops import DTYPES, load_native_ops
from decode.devices.attention import OWN, attend_generally

ATTENTION = f"{OWN}cpu"


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The same as transformers' sdpa attention, but queries share their key-value heads instead of repeating them."""
    if kwargs.get("position_bias") is not None or attention_mask is None or attention_mask.dtype != query.dtype:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return attend(query, key, value, attention_mask, kwargs.get("scaling") or query.shape[3] ** -0.5), None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """See `decode.devices.attention`. The op has no gradients, which an adapter on one of them may need."""
    has_gradient = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if query.dtype in DTYPES and mask.shape[1] == 1 and not has_gradient and load_native_ops() is None:
        output: Tensor = torch.ops.draftless.tree_attention(query, key, value, mask, scale)
        return output
    return attend_generally(query, key, value, mask, scale)


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
