"""Attention on a GPU: groups share their keys and values, and long texts are seen without a mask.

Shapes: B rows, N nodes, S slots of the KV cache, D head size; heads share the keys and values of their group.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from decode.devices.attention import OWN, attend_generally, attend_in_two, attend_stacked

ATTENTION = f"{OWN}cuda"


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The same as transformers' sdpa attention.

    A mask may be narrower than the keys: all nodes see the slots before those that it is for. With a mask of no slots,
    the nodes are the last tokens, and each sees those up to its own. transformers would make a mask of that itself.
    """
    scale = kwargs.get("scaling") or query.shape[3] ** -0.5
    if kwargs.get("position_bias") is not None or attention_mask is None or attention_mask.dtype != query.dtype:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if attention_mask.shape[3]:
        return attend_generally(query, key, value, attention_mask, scale), None
    if query.shape[2] == 1:
        return attend_stacked(query, key, value, None, scale), None
    return attend_in_two(query, key, value, None, key.shape[2] - query.shape[2], scale), None


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
