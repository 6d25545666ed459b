"""Grouped-query attention that does not repeat keys and values in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from decode.cpu.native_ops import can_run, load_native_ops

ATTENTION = "draftless_grouped_sdpa"
_REPEATED = WeakTensorKeyDictionary()  # a mask -> the same mask, repeated; forgotten with the mask


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The same as transformers' sdpa attention, but queries share their key-value heads instead of repeating them."""
    if attention_mask is None or attention_mask.dtype != query.dtype or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return attend_grouped(query, key, value, attention_mask, kwargs.get("scaling") or query.shape[3] ** -0.5), None


def attend_grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Queries [B, heads, N, D] and keys and values [B, groups, S, D] -> [B, N, heads, D].

    mask: [B, 1, N, S] to add to the scores, in the queries' dtype.
    """
    can_run_all = can_run(query) and can_run(key) and can_run(value)  # an adapter may be on one of them only
    if can_run_all and mask.shape[1] == 1 and load_native_ops() is None:
        output: Tensor = torch.ops.draftless.attention(query, key, value, mask, scale)
        return output
    return attend_stacked(query, key, value, mask, scale)


def attend_stacked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`attend_grouped` by torch's own attention: the queries of a group are stacked as if they were more nodes.

    The mask may be repeated for them already.
    """
    batch, heads, nodes, size = query.shape
    stacked = query.reshape(batch, key.shape[1], -1, size)
    if mask.shape[2] < stacked.shape[2]:
        mask = repeat_mask(mask, heads // key.shape[1])  # [B, 1, heads / groups * N, S]
    output = nn.functional.scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=scale)
    return output.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous()


def repeat_mask(mask: Tensor, times: int) -> Tensor:
    """A mask [B, 1, N, S] as [B, 1, times x N, S], for stacked queries: on a GPU once a step, not once a layer."""
    if mask.device.type == "cpu" or torch.compiler.is_compiling():  # without a dictionary
        return mask.repeat(1, 1, times, 1)
    repeated = _REPEATED.get(mask)
    if repeated is None or repeated.shape[2] != times * mask.shape[2]:
        repeated = _REPEATED[mask] = mask.repeat(1, 1, times, 1)
    return repeated


AttentionInterface.register(ATTENTION, grouped_sdpa)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
