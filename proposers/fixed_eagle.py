"""EAGLE drafting at fixed shapes, for a GPU: a few fused kernels a level, and nothing that the host must wait for.

Shapes: B rows, T tokens, W paths, S slots that are allocated, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decode.cpu.grouped_attention import attend_stacked
from decode.gpu.fusion import fused
from heads.layer_cache import FixedSlots, LayerCache, hide
from proposers.head_proposer import FeaturePart, expand_last, pick_last


class FixedEagleDrafter:
    """What `EagleDrafter` drafts, after reading the features that the head has not read.

    Attention sees all slots, so that shapes stay the same from level to level and from step to step. levels,
    drafted: of the draft at most, its levels and its tokens.
    """

    def __init__(
        self,
        head: Any,
        embed: Callable[[Tensor], Tensor],
        cache: LayerCache,
        unread: FeaturePart,
        levels: int,
        drafted: int,
    ) -> None:
        device, count = unread.features.device, unread.features.shape[1]
        begin = max(cache.lengths) + count  # draft tokens come after the longest text and its padding
        self.cache = cache.reserve(begin + drafted)
        lengths = cache.positions(1, device)
        self.states, self.mask, self.positions, self._logits = read_features(
            head, embed, *self.cache, unread.features, unread.following, unread.counts_tensor, lengths, levels
        )
        cache.keep(unread.counts, unread.counts_tensor)
        self.head, self.embed = head, embed
        self.slots = torch.arange(begin, begin + drafted, device=device)[None]

    def logits(self, level: int) -> Tensor:
        return self._logits

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        width = parents.shape[1]
        slots, self.slots = self.slots[:, :width], self.slots[:, width:]
        position, self.positions = self.positions[:, :1], self.positions[:, 1:]
        self.states, self.mask, self._logits = extend_paths(
            self.head, self.embed, *self.cache, self.states, self.mask, position, slots, parents, tokens
        )


@fused
def read_features(
    head: Any,
    embed: Callable[[Tensor], Tensor],
    keys: Tensor,
    values: Tensor,
    features: Tensor,
    following: Tensor,
    counts: Tensor,
    lengths: Tensor,
    levels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read the target's fused features [B, T, H] and the tokens [B, T] after them, `counts` [B] in each row.

    lengths [B, 1]: tokens that were read before. Returns what drafting starts from: each row's last state [B, 1, H],
    the mask [B, 1, S] of its text, the positions [B, levels] of tokens after it, and the logits [B, 1, D].
    """
    dtype, slots = keys.dtype, torch.arange(keys.shape[2], device=keys.device)
    positions = lengths + torch.arange(features.shape[1], device=keys.device)
    mask = hide(slots > positions[..., None], dtype)[:, None]
    context = FixedSlots(keys, values, positions, attend)
    states = head(embed(following).to(dtype), features.to(dtype), positions, mask, context)
    last, length = pick_last(states, counts)[:, None], lengths + counts[:, None]
    following_positions = length + torch.arange(levels, device=keys.device)
    return last, hide(slots >= length, dtype)[:, None], following_positions, head.logits(last)


@fused
def extend_paths(
    head: Any,
    embed: Callable[[Tensor], Tensor],
    keys: Tensor,
    values: Tensor,
    states: Tensor,
    mask: Tensor,
    positions: Tensor,
    slots: Tensor,
    parents: Tensor,
    tokens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Continue the paths `parents` [B, W] by their next tokens [B, W], which go to `slots` [1, W].

    states [B, *, H] and mask [B, *, S] are of the paths before, positions [B, 1] of the next token. Returns the same
    for the new paths, and the logits [B, W, D].
    """
    states, above = (part.gather(1, expand_last(parents, part)) for part in (states, mask))
    own = torch.arange(keys.shape[2], device=keys.device) == slots[0, :, None]  # [W, S]
    mask = above.masked_fill(own, 0)
    context = FixedSlots(keys, values, slots, attend)
    states = head(embed(tokens).to(states.dtype), states, positions, mask[:, None], context)
    return states, mask, head.logits(states)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """`proposers.packed_head.attend_like_target` on a GPU."""
    return attend_stacked(queries, keys, values, mask, queries.shape[3] ** -0.5).transpose(1, 2)
