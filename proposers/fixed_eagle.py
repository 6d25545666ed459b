"""EAGLE drafting at fixed shapes, for a GPU: a few fused kernels a level, and nothing that the host must wait for.

Shapes: B rows, T tokens, W paths, S slots that are allocated, H hidden size, D draft vocabulary, R queries that share a
key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.gpu.fusion import fused
from decode.models.grouped_attention import attend_stacked
from heads.layer_cache import FixedSlots, LayerCache, hide
from heads.rope import RotaryTable
from proposers.feature_history import expand_last, pick_last


class Paths(NamedTuple):
    """The paths of a level."""

    states: Tensor  # [B, W, H]: the last one of each path
    mask: Tensor  # [B, R, W, S]: what it attends to, the same for all R
    logits: Tensor  # [B, W, D]: of the next token


class FixedEagleDrafter:
    """Drafts as `EagleDrafter` does, in steps of fixed shape, after reading the features that are new.

    Attention sees all slots, so shapes stay the same from level to level and from step to step. Draft tokens take the
    last slots.
    inputs: `features` [B, T, H], the tokens `following` them [B, T], how many each row has (`counts` [B]), and how many
    were read before (`lengths` [B]). levels, drafted: the most levels and tokens of a draft.
    """

    def __init__(
        self,
        head: Any,
        embed: Callable[[Tensor], Tensor],
        cache: LayerCache,
        inputs: Mapping[str, Tensor],
        levels: int,
        drafted: int,
    ) -> None:
        self.cache = cache.allocated()
        end = self.cache[0].shape[2]
        self.slot = torch.arange(end, device=inputs["features"].device)  # [S]
        self.paths, self.table = read_features(
            head,
            embed,
            *self.cache,
            inputs["features"],
            inputs["following"],
            inputs["counts"],
            inputs["lengths"],
            self.slot,
            levels,
        )
        self.head, self.embed = head, embed
        self.level, self.begin = 0, end - drafted  # the first slot of the next level

    def logits(self, level: int) -> Tensor:
        return self.paths.logits

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        end = self.begin + parents.shape[1]
        table, new = self.table.part(self.level, self.level + 1), self.slot[self.begin : end]
        self.paths = extend_paths(
            self.head, self.embed, *self.cache, self.paths, table, self.slot, new, parents, tokens
        )
        self.level, self.begin = self.level + 1, end


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
    slot: Tensor,
    levels: int,
) -> tuple[Paths, RotaryTable]:
    """Read the target's fused features [B, T, H] and the tokens [B, T] after them, `counts` [B] in each row.

    lengths [B]: tokens that were read before. slot [S]: all slots. Returns the only path of the first level, and the
    rotary table of the positions of all levels.
    """
    dtype, layer, count, device = keys.dtype, head.config.layer, features.shape[1], keys.device
    positions, after = lengths[:, None] + torch.arange(count, device=device), (lengths + counts)[:, None]
    next_positions = after + torch.arange(levels, device=device)
    table = layer.rotary_table(torch.cat([positions, next_positions], dim=1), dtype)
    mask = hide(slot > positions[..., None], dtype)[:, None]
    context = FixedSlots(keys, values, positions, attend)
    states = head(embed(following).to(dtype), features.to(dtype), table.part(0, count), mask, context)
    last = pick_last(states, counts)[:, None]
    shared = layer.num_attention_heads // layer.num_key_value_heads
    mask = hide(slot >= after, dtype)[:, None, None].expand(-1, shared, -1, -1)
    return Paths(last, mask, head.logits(last)), table.part(count, count + levels)


@fused
def extend_paths(
    head: Any,
    embed: Callable[[Tensor], Tensor],
    keys: Tensor,
    values: Tensor,
    before: Paths,
    table: RotaryTable,
    slot: Tensor,
    new: Tensor,
    parents: Tensor,
    tokens: Tensor,
) -> Paths:
    """Continue the paths `parents` [B, W] by their next tokens [B, W], which go to the slots `new` [W].

    table: of the next position. slot [S]: all slots.
    """
    shared, size = before.mask.shape[1], before.mask.shape[3]
    own = slot == new[:, None]
    mask = before.mask.gather(2, parents[:, None, :, None].expand(-1, shared, -1, size)).masked_fill(own, 0)
    states = before.states.gather(1, expand_last(parents, before.states))
    context = FixedSlots(keys, values, new, attend)
    states = head(embed(tokens).to(states.dtype), states, table, mask.flatten(1, 2)[:, None], context)
    return Paths(states, mask, head.logits(states))


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """`proposers.feature_history.attend_like_target` on a GPU."""
    return attend_stacked(queries, keys, values, mask, queries.shape[3] ** -0.5).transpose(1, 2)
