"""Grouped-query attention that does not repeat keys and values in memory, and sees long texts without a mask.

Shapes: B rows, N nodes, S slots of the KV cache, D head size; heads share the keys and values of their group.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from decode.cpu.native_ops import can_run, load_native_ops

ATTENTION = "draftless_grouped_sdpa"
LONG = 2048  # committed tokens from which two kernels are faster than one with a mask (docs/gpu.md)
SLOTS = 64  # texts are seen whole in multiples of this: kernels with masks want aligned ones
STRIDE = 1024  # the same for CUDA graphs: capturing one takes as long as a few steps
HALVES = torch.float16, torch.bfloat16  # the dtypes of flash attention ...
LARGEST_HEAD, MULTIPLE = 256, 8  # ... and its head sizes
_REPEATED = WeakTensorKeyDictionary()  # a mask -> the same mask, repeated; forgotten with the mask


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The same as transformers' sdpa attention, but queries share their key-value heads instead of repeating them.

    A mask may be narrower than the keys: all nodes see the slots before those that it is for. With a mask of no slots,
    the nodes are the last tokens, and each sees those up to its own. transformers would make a mask of that itself.
    """
    scale = kwargs.get("scaling") or query.shape[3] ** -0.5
    if kwargs.get("position_bias") is None and attention_mask is not None and attention_mask.dtype == query.dtype:
        if attention_mask.shape[3]:
            return attend_grouped(query, key, value, attention_mask, scale), None
        if query.shape[2] == 1:
            return attend_stacked(query, key, value, None, scale), None
        return attend_in_two(query, key, value, None, key.shape[2] - query.shape[2], scale), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def attend_grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Queries [B, heads, N, D] and keys and values [B, groups, S, D] -> [B, N, heads, D].

    mask: [B, 1, N, S] to add to the scores, in the queries' dtype. Where the project's op does not run, it may be
    narrower, see `grouped_sdpa`.
    """
    can_run_all = can_run(query) and can_run(key) and can_run(value)  # an adapter may be on one of them only
    if can_run_all and mask.shape[1] == 1 and load_native_ops() is None:
        output: Tensor = torch.ops.draftless.attention(query, key, value, mask, scale)
        return output
    if seen := key.shape[2] - mask.shape[3]:
        return attend_in_two(query, key, value, mask, seen, scale)
    return attend_stacked(query, key, value, mask, scale)


def attend_stacked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`attend_grouped` by torch's own attention: the queries of a group are stacked as if they were more nodes.

    The mask may be repeated for them already.
    """
    stacked, mask = _stack(query, key, mask)
    output = nn.functional.scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=scale)
    return _unstack(output, query)


def attend_in_two(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seen: int, scale: float) -> Tensor:
    """`attend_grouped` where all nodes see the first `seen` slots.

    mask [B, 1, N, S - seen]: what they see of the other slots. None: these hold the nodes, and a node sees the nodes
    up to its own. On a GPU, a kernel without a mask shares the slots among all processors, a kernel with one does not.
    The two parts are joined by the sums of their weights, as in FlashAttention (Dao et al., 2022, section 3).
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
    if query.device.type == "cuda" and query.dtype in HALVES:
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
    """Queries [B, groups, heads / groups * N, D], and a mask for them."""
    stacked = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    if mask is not None and mask.shape[2] < stacked.shape[2]:
        mask = repeat_mask(mask, query.shape[1] // key.shape[1])
    return stacked, mask


def _unstack(output: Tensor, query: Tensor) -> Tensor:
    """What stacked queries found, [B, N, heads, D]."""
    return output.reshape(*query.shape[:3], -1).transpose(1, 2).contiguous()


def repeat_mask(mask: Tensor, times: int) -> Tensor:
    """A mask [B, 1, N, S] as [B, 1, times x N, S], for stacked queries: on a GPU once a step, not once a layer."""
    if mask.device.type == "cpu" or torch.compiler.is_compiling():  # without a dictionary
        return mask.repeat(1, 1, times, 1)
    repeated = _REPEATED.get(mask)
    if repeated is None or repeated.shape[2] != times * mask.shape[2]:
        repeated = _REPEATED[mask] = mask.repeat(1, 1, times, 1)
    return repeated


def sees_texts_whole(model: PreTrainedModel) -> bool:
    """Whether the nodes of a model's full-attention layers may see long texts without a mask (`attend_in_two`)."""
    config = model.config.get_text_config(decoder=True)
    shape = config.to_dict()  # reading an attribute that differs between layers raises
    size = shape.get("head_dim") or config.hidden_size // config.num_attention_heads
    is_plain = not shape.get("kv_lora_rank") and not shape.get("global_head_dim")
    is_grouped = model.config._attn_implementation == ATTENTION
    return is_plain and is_grouped and gains_from_two(model.device, model.dtype, size)


def gains_from_two(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether `attend_in_two` is faster for heads of a size: where flash attention is."""
    return device.type == "cuda" and dtype in HALVES and size % MULTIPLE == 0 and size <= LARGEST_HEAD


def count_seen(lengths: Sequence[int], multiple: int | None = None) -> int:
    """The slots of texts of these lengths that all nodes should see without a mask; 0 if texts are short."""
    multiple = multiple or SLOTS
    seen = min(lengths) // multiple * multiple
    return seen if seen >= LONG else 0


def find_window(lengths: Sequence[int], capacity: int, more: int, gains: bool) -> tuple[int, int]:
    """The slots that all nodes see without a mask, and those in all that they see, for steps of fixed shape.

    lengths: of the texts; `more` slots follow the longest, of `capacity`. gains: see `gains_from_two`. Both numbers
    change rarely, because each takes CUDA graphs of its own.
    """
    if not gains or not (seen := count_seen(lengths, STRIDE)):
        return 0, capacity
    return seen, min(capacity, -(-(max(lengths) + more) // STRIDE) * STRIDE)


def choosing_kernels(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU, torch's own attention kernels but cuDNN's.

    cuDNN makes a plan for each new shape, and nearly every draft tree has one: 43 ms each on an H200, where the other
    kernels take 0.1 (docs/gpu.md).
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


AttentionInterface.register(ATTENTION, grouped_sdpa)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
