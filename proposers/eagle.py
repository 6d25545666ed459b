"""EAGLE drafting. Committed tokens use the target's features; draft tokens use the head's own predictions of them.

After Li et al., "EAGLE", "EAGLE-2" (2024) and "EAGLE-3" (2025). Shapes: B rows, T tokens, W paths, S cache slots, H
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from decode import Step, Target
from heads import LayerCache
from proposers.fast_heads import Inputs, pad_tokens
from proposers.feature_history import CHUNK, expand_last
from proposers.fixed_eagle import FixedEagleDrafter
from proposers.head_proposer import HeadProposer

DEPTH, WIDTH = 6, 10  # of EAGLE-2


class EagleProposer(HeadProposer):
    """Drafts with an `EagleHead` or an `Eagle3Head`, one pass of it over all paths a level.

    Slot i of its cache is for the target's feature i with token i + 1, at position i. Before each draft the head reads
    the features committed since the last. It never attends to its own features of earlier drafts, which would cost 8 to
    15% of acceptance (vLLM, #14649).
    """

    levels, width, ranks = DEPTH, WIDTH, WIDTH

    @torch.no_grad()
    def combine(self, features: Tensor) -> Tensor:
        return self.head.fuse(features.to(self.dtype))

    def read_step(self, step: Step) -> Inputs:
        """What a draft starts from: the head's last states, or on a GPU the features that its graph is to read.

        Many features at once, as of a prompt, are read here on a GPU too.
        """
        cache, embed, device = self._history.cache, self.embedding(step.target), step.target.device
        if device.type == "cuda" and cache.keys is not None and max(self._history.unread_counts) <= CHUNK:
            unread, lengths = self._history.take(), cache.lengths_on(device)
            cache.reserve(max(cache.lengths) + pad_tokens(unread.features.shape[1]) + self._most_drafted)
            cache.keep(unread.counts, unread.counts_tensor)
            numbers = {"counts": unread.counts_tensor, "lengths": lengths}
            return {"features": unread.features, "following": unread.following, **numbers}

        def read(fused: Tensor, tokens: Tensor, counts: list[int], on_device: Tensor | None) -> Tensor:
            positions = cache.positions(fused.shape[1], fused.device)
            states: Tensor = self.head(embed(tokens), fused, positions, context=cache)
            cache.keep(counts, on_device)
            return states

        return {"states": self._history.read(self.dtype, read)}

    def is_fixed(self, inputs: Inputs) -> bool:
        return "features" in inputs

    @property
    def written(self) -> Tensor | None:
        return self._history.cache.keys

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> EagleDrafter | FixedEagleDrafter:
        if "states" in inputs:
            return EagleDrafter(self.head, inputs["states"], self._history.cache, self.embedding(target))
        embed = self.head.embed_tokens or target.model.get_input_embeddings()
        return FixedEagleDrafter(self.head, embed, self._history.cache, inputs, self.depth, self._most_drafted)

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
        self.states = self.head(self.embed(tokens), states, self.positions, self.mask[:, None], self.cache)
        self.positions = self.positions + 1
