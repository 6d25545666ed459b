"""EAGLE drafting. Committed tokens use the target's features; draft tokens use the head's own predictions of them.

After Li et al., "EAGLE", "EAGLE-2" (2024) and "EAGLE-3" (2025). Shapes: B rows, T tokens, W paths, N nodes drafted so
far, S cache slots, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decode import Step
from heads import LayerCache
from proposers.head_proposer import HeadProposer

DEPTH, WIDTH = 6, 10  # of EAGLE-2


class EagleProposer(HeadProposer):
    """Drafts with an `EagleHead` or an `Eagle3Head`, one pass of it over all paths a level.

    Slot i of its cache is for the target's feature i with token i + 1, at position i. Before each draft the head reads
    the features committed since the last. It never attends to its own features of earlier drafts, which would cost 8 to
    15% of acceptance (vLLM, #14649).
    """

    static = "eagle_25"
    levels, width, ranks = DEPTH, WIDTH, WIDTH

    @property
    def reads_all_features(self) -> bool:
        return True

    def start_drafter(self, step: Step, roots: Tensor) -> EagleDrafter:
        cache, embed = self._history.cache, self.embedding(step.target)

        def read(features: Tensor, tokens: Tensor, counts: list[int]) -> Tensor:
            fused = self.head.fuse(features)
            states: Tensor = self.head(
                embed(tokens), fused, cache.positions(fused.shape[1], fused.device), context=cache
            )
            cache.keep(counts)
            return states

        return EagleDrafter(self.head, self._history.read(step, self.dtype, read), cache, embed)


class EagleDrafter:
    """Drafts one step after the texts in a cache, from their last states [B, H]. Nodes are cached after the texts."""

    def __init__(self, head: Any, states: Tensor, cache: LayerCache, embed: Callable[[Tensor], Tensor]) -> None:
        self.head, self.cache, self.embed, self.level = head, cache, embed, 0
        self.starts = cache.positions(1, states.device)  # [B, 1]
        self.states = states[:, None]  # [B, W, H]: the last one of each path
        self.on_path = torch.zeros(len(states), 1, 0, dtype=torch.bool, device=states.device)  # [B, W, N]

    def logits(self, level: int) -> Tensor:
        return self.head.logits(self.states, level)

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        states, on_path = (
            part.gather(1, parents[..., None].expand(*parents.shape, part.shape[2]))
            for part in (self.states, self.on_path)
        )
        itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        self.on_path = torch.cat([on_path, itself], dim=2)
        positions = (self.starts + self.level).expand_as(tokens)  # siblings share a position
        self.states = self.head(self.embed(tokens), states, positions, self._mask(), self.cache)
        self.cache.keep([tokens.shape[1]] * len(tokens))
        self.level += 1

    def _mask(self) -> Tensor:
        """What each path's last node attends to, bool [B, 1, W, S]: the whole text and the nodes on its path."""
        paths, nodes = self.on_path.shape[1:]
        slots = torch.arange(max(self.cache.lengths) + paths, device=self.on_path.device)
        node = slots - self.starts  # [B, S]: the node in a slot; below 0 the text, from `nodes` on padding
        own = self.on_path.gather(2, node.clamp(0, nodes - 1)[:, None].expand(-1, paths, -1))
        return ((node < 0)[:, None] | own & (node < nodes)[:, None])[:, None]
