"""EAGLE drafting. Committed tokens use the target's features; draft tokens use the head's own predictions of them.

After Li et al., "EAGLE", "EAGLE-2" (2024) and "EAGLE-3" (2025). Shapes: B rows, T tokens, W paths, S cache slots, H
hidden size, D draft vocabulary, R queries that share a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode import Step, Target
from decode.models.grouped_attention import attend_in_two, attend_stacked, find_window, gains_from_two
from heads.layer_cache import FixedSlots, LayerCache, hide
from heads.rope import RotaryTable
from proposers.fast_heads import pad_tokens
from proposers.feature_history import CHUNK, Counts, expand_last, pick_last
from proposers.head_proposer import HeadProposer
from proposers.tree_proposer import Inputs

DEPTH, WIDTH = 6, 10  # of EAGLE-2


class EagleProposer(HeadProposer):
    """Drafts with an `EagleHead` or an `Eagle3Head`, one pass of it over all paths a level.

    Slot i of its cache is for the target's feature i with token i + 1, at position i. Before each draft the head reads
    the features committed since the last. It never attends to its own features of earlier drafts, which would cost 8 to
    15% of acceptance (vLLM, #14649).
    """

    levels, usual_width, usual_ranks = DEPTH, WIDTH, WIDTH

    @torch.no_grad()
    def fuse(self, features: Tensor) -> Tensor:
        return self.head.fuse(features.to(self.dtype))

    def read_step(self, step: Step) -> Inputs:
        """What a draft starts from: the head's last states, or on a GPU the features that its graph is to read.

        Many features at once, as of a prompt, are read here on a GPU too.
        """
        read, device = partial(self.read, step.target), step.target.device
        self._history.read_prompts(read)
        cache = self._history.cache
        if device.type == "cuda" and cache.held is not None and max(self._history.unread_counts) <= CHUNK:
            unread, lengths = self._history.take(), cache.lengths_on(device)
            gains = gains_from_two(device, self.dtype, self.head.config.layer.head_dim)
            more = pad_tokens(unread.features.shape[1]) + self._most_drafted
            cache.reserve(max(cache.lengths) + more)
            self.window = find_window(cache.lengths, cache.held[0].shape[2], more, gains)
            cache.keep(unread.counts, unread.counts_tensor)
            numbers = {"counts": unread.counts_tensor, "lengths": lengths}
            return {"features": unread.features, "following": unread.following, **numbers}

        return {"states": self._history.read_all(read)}

    def read(
        self,
        target: Target,
        cache: LayerCache,
        features: Tensor,
        tokens: Tensor,
        counts: Counts,
        on_device: Tensor | None,
    ) -> Tensor:
        positions, embed = cache.positions(features.shape[1], features.device), self.embedding(target)
        states: Tensor = self.head(embed(tokens), features.to(self.dtype), positions, cache.attend)
        cache.keep(counts, on_device)
        return states

    def is_fixed(self, inputs: Inputs) -> bool:
        return "features" in inputs

    @property
    def written(self) -> Tensor | None:
        held = self._history.cache.held
        return None if held is None else held[0]

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> EagleDrafter | FixedEagleDrafter:
        if "states" in inputs:
            return EagleDrafter(self.head, inputs["states"], self._history.cache, self.embedding(target))
        embed = self.head.embed_tokens or target.model.get_input_embeddings()
        return FixedEagleDrafter(
            self.head, embed, self._history.cache, inputs, self.depth, self._most_drafted, self.window
        )

    @property
    def _most_drafted(self) -> int:
        """The tokens that a draft has at most."""
        return self.depth * self.width


class EagleDrafter:
    """Drafts one step after the texts in a cache, from their last states [B, H]. Nodes are cached after the texts."""

    def __init__(self, head: Any, states: Tensor, cache: LayerCache, embed: Callable[[Tensor], Tensor]) -> None:
        self.head, self.cache, self.embed = head, cache, embed
        self.states = states[:, None]  # [B, W, H]: the last one of each path
        self.positions = cache.positions(1, states.device)  # [B, 1] of the next level, which all paths share
        self.mask = cache.text_mask(states.device, states.dtype)  # [B, W, S]: what each path's last node attends to

    def logits(self, level: int) -> Tensor:
        return self.head.logits(self.states, level)

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        states, above = (part.gather(1, expand_last(parents, part)) for part in (self.states, self.mask))
        others = above.new_full([tokens.shape[1]] * 2, torch.finfo(above.dtype).min).fill_diagonal_(0)
        self.mask = torch.cat([above, others.expand(len(tokens), -1, -1)], dim=2)
        attend = partial(self.cache.attend, mask=self.mask[:, None])
        self.states = self.head(self.embed(tokens), states, self.positions, attend)
        self.positions = self.positions + 1


# ---- the same at fixed shapes, for a GPU ----


class Paths(NamedTuple):
    """The paths of a level, at fixed shapes."""

    states: Tensor  # [B, W, H]: the last one of each path
    mask: Tensor  # [B, R, W, S]: what it attends to, the same for all R
    logits: Tensor  # [B, W, D]: of the next token


class FixedEagleDrafter:
    """Drafts as `EagleDrafter` does, on a GPU: a few fused kernels a level, and nothing that the host must wait for.

    It reads the features that are new first. Attention sees all slots, so shapes stay the same from level to level and
    from step to step. Draft tokens take the last slots.
    inputs: `features` [B, T, H], the tokens `following` them [B, T], how many each row has (`counts` [B]), and how many
    were read before (`lengths` [B]). levels, drafted: the most levels and tokens of a draft. window: of
    `find_window`.
    """

    def __init__(
        self,
        head: Any,
        embed: Callable[[Tensor], Tensor],
        cache: LayerCache,
        inputs: Mapping[str, Tensor],
        levels: int,
        drafted: int,
        window: tuple[int, int],
    ) -> None:
        keys, values = cache.allocated()
        self.cache = keys[:, :, : window[1]], values[:, :, : window[1]]
        self.slot = torch.arange(*window, device=inputs["features"].device)  # [S]
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
        self.level, self.begin = 0, len(self.slot) - drafted  # the place of the next level's first slot

    def logits(self, level: int) -> Tensor:
        return self.paths.logits

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        end = self.begin + parents.shape[1]
        table, new = self.table.part(self.level, self.level + 1), self.slot[self.begin : end]
        self.paths = extend_paths(
            self.head, self.embed, *self.cache, self.paths, table, self.slot, new, parents, tokens
        )
        self.level, self.begin = self.level + 1, end


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

    lengths [B]: tokens that were read before. slot [S]: all slots that need a mask. Returns the only path of the first
    level, and the rotary table of the positions of all levels.
    """
    dtype, layer, count, device = keys.dtype, head.config.layer, features.shape[1], keys.device
    positions, after = lengths[:, None] + torch.arange(count, device=device), (lengths + counts)[:, None]
    next_positions = after + torch.arange(levels, device=device)
    table = layer.rotary_table(torch.cat([positions, next_positions], dim=1), dtype)
    mask = hide(slot > positions[..., None], dtype)[:, None]
    slots = FixedSlots(keys, values, positions, mask, attend)
    states = head(embed(following).to(dtype), features.to(dtype), table.part(0, count), slots.attend)
    last = pick_last(states, counts)[:, None]
    shared = layer.num_attention_heads // layer.num_key_value_heads
    mask = hide(slot >= after, dtype)[:, None, None].expand(-1, shared, -1, -1)
    return Paths(last, mask, head.logits(last)), table.part(count, count + levels)


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

    table: of the next position. slot [S]: all slots that need a mask.
    """
    shared, size = before.mask.shape[1], before.mask.shape[3]
    own = slot == new[:, None]
    mask = before.mask.gather(2, parents[:, None, :, None].expand(-1, shared, -1, size)).masked_fill(own, 0)
    states = before.states.gather(1, expand_last(parents, before.states))
    slots = FixedSlots(keys, values, new, mask.flatten(1, 2)[:, None], attend)
    states = head(embed(tokens).to(states.dtype), states, table, slots.attend)
    return Paths(states, mask, head.logits(states))


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """`proposers.feature_history.attend_like_target` on a GPU."""
    scale = queries.shape[3] ** -0.5
    if seen := keys.shape[2] - mask.shape[3]:
        return attend_in_two(queries, keys, values, mask, seen, scale).transpose(1, 2)
    return attend_stacked(queries, keys, values, mask, scale).transpose(1, 2)
