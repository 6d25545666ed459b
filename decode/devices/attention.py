"""Grouped-query attention, which does not repeat keys and values in memory: by the device's own op or torch's kernels.

Shapes: B rows, N nodes, S slots of the KV cache, D head size; heads share the keys and values of their group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from decode.devices.backend import find_backend
from decode.devices.transfer import waits

ATTENTION = "draftless_grouped"  # transformers' name for `grouped_attention`
HALVES = torch.float16, torch.bfloat16  # half precision; no other dtype has flash attention
_REPEATED = WeakTensorKeyDictionary()  # a mask -> the same mask, repeated; forgotten with the mask


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The same as transformers' sdpa attention, but queries share their key-value heads instead of repeating them."""
    if kwargs.get("position_bias") is not None or attention_mask is None or attention_mask.dtype != query.dtype:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scale = kwargs.get("scaling") or query.shape[3] ** -0.5
    return (find_backend(query.device).attend or attend_generally)(query, key, value, attention_mask, scale), None


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`attend_generally` by the device's own function, if it has one."""
    return (find_backend(query.device).attend or attend_generally)(query, key, value, mask, scale)


def attend_generally(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Queries [B, heads, N, D] and keys and values [B, groups, S, D] -> [B, N, heads, D].

    mask: to add to the scores, in the queries' dtype; it may be repeated for stacked queries already. It may be
    narrower than S: all nodes see the slots before those that it is for. If it is for none, the nodes are the last
    tokens, and each sees those up to its own.
    """
    nodes, slots = query.shape[2], mask.shape[3]
    if slots == 0 and nodes > 1:
        return attend_in_two(query, key, value, None, key.shape[2] - nodes, scale)
    if slots and (seen := key.shape[2] - slots):
        return attend_in_two(query, key, value, mask, seen, scale)
    stacked, repeated = _stack(query, key, mask if slots else None)
    output = nn.functional.scaled_dot_product_attention(stacked, key, value, attn_mask=repeated, scale=scale)
    return _unstack(output, query)


def attend_in_two(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seen: int, scale: float) -> Tensor:
    """`attend_generally` where all nodes see the first `seen` slots.

    mask [B, 1, N, S - seen]: what they see of the other slots. None: these hold the nodes, and a node sees the nodes
    up to its own. On a GPU, a kernel without a mask shares the slots among all processors, a kernel with one
    does not. The two parts are joined by the sums of their weights, as in FlashAttention (Dao et al., 2022, section 3).
    """
    stacked, repeated = _stack(query, key, mask)
    first, first_sum = _attend(stacked, key[:, :, :seen], value[:, :, :seen], None, scale)
    key, value = key[:, :, seen:], value[:, :, seen:]
    if mask is None:
        times = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(times, dim=1) for states in (key, value))
        own, own_sum = _attend(query, key, value, None, scale, is_causal=True)
        own, own_sum = own.reshape(first.shape), own_sum.reshape(first_sum.shape)
    else:
        own, own_sum = _attend(stacked, key, value, repeated, scale)
    share = torch.sigmoid(first_sum - own_sum)[..., None].to(torch.promote_types(query.dtype, torch.float32))
    return _unstack(own.to(share.dtype).lerp(first.to(share.dtype), share).to(query.dtype), query)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention [B, groups, N, D] of as many heads as groups, and the logarithm of each query's weights' sum."""
    if waits(query) and query.dtype in HALVES:
        if mask is None:
            output, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, is_causal, False, scale=scale
            )
        else:
            mask = mask.expand(-1, query.shape[1], -1, -1)
            output, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, True, 0.0, False, scale=scale
            )
        return output, sums[:, :, : query.shape[2]]
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(2, 3) * scale
    if mask is not None:
        scores = scores + mask
    if is_causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    sums = scores.logsumexp(dim=3)
    return ((scores - sums[..., None]).exp() @ value.to(wide)).to(query.dtype), sums


def _stack(query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Queries [B, groups, heads / groups * N, D], those of a group as if they were more nodes, and a mask for them."""
    stacked = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    if mask is not None and mask.shape[2] < stacked.shape[2]:
        mask = repeat_mask(mask, query.shape[1] // key.shape[1])
    return stacked, mask


def _unstack(output: Tensor, query: Tensor) -> Tensor:
    """What stacked queries found, [B, N, heads, D]."""
    return output.reshape(*query.shape[:3], -1).transpose(1, 2).contiguous()


def repeat_mask(mask: Tensor, times: int) -> Tensor:
    """A mask [B, 1, N, S] as [B, 1, times x N, S], for stacked queries: on a GPU once a step, not once a layer."""
    if not waits(mask) or torch.compiler.is_compiling():  # without a dictionary
        return mask.repeat(1, 1, times, 1)
    repeated = _REPEATED.get(mask)
    if repeated is None or repeated.shape[2] != times * mask.shape[2]:
        repeated = _REPEATED[mask] = mask.repeat(1, 1, times, 1)
    return repeated
