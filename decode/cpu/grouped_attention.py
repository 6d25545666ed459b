"""Grouped-query attention that does not repeat keys and values in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from decode.kv_cache import LARGE

ATTENTION = "draftless_grouped_sdpa"


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The same as transformers' sdpa attention, but queries share their key-value heads instead of repeating them.

    The queries of a group are stacked as if they were more nodes. torch's own kernel for grouped queries takes 5 times
    as long in bfloat16.
    """
    if attention_mask is None or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    batch, heads, nodes, size = query.shape
    groups = heads // key.shape[1]
    stacked = query.reshape(batch, key.shape[1], groups * nodes, size)
    mask = attention_mask if nodes == 1 else attention_mask.repeat(1, 1, groups, 1)  # [B, 1, G * N, S]
    scale = kwargs.get("scaling")
    if nodes == 1 and batch >= LARGE and key.dtype == torch.bfloat16 and key.is_contiguous():
        # As transformers' eager attention. torch's fused kernel makes a call per row and head: almost twice the time.
        scores = torch.matmul(stacked, key.transpose(-1, -2)).float() * (scale or size**-0.5) + mask
        output = torch.matmul(scores.softmax(-1).to(value.dtype), value)
    else:
        output = nn.functional.scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=scale)
    return output.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, grouped_sdpa)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
