"""EAGLE drafting. Committed tokens use the target's features; draft tokens use the head's own predictions of them.

After Li et al., "EAGLE", "EAGLE-2" (2024) and "EAGLE-3" (2025). Shapes: B rows, T tokens, W paths, N nodes drafted so
far, S cache slots, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode import Step
from heads import Eagle3Head, EagleHead, LayerCache
from proposers.calibration import Calibration
from proposers.fixed_trees import Ranks
from proposers.head_proposer import HeadProposer, pick_last, split_in_chunks

DEPTH, WIDTH = 6, 10  # of EAGLE-2


class EagleProposer(HeadProposer):
    """Drafts with an `EagleHead` or an `Eagle3Head`, one pass of it over all paths a level.

    Slot i of its cache is for the target's feature i with token i + 1, at position i. Before each draft the head reads
    the features committed since the last. It never attends to its own features of earlier drafts, which would cost 8 to
    15% of acceptance (vLLM, #14649).

    depth: levels of a tree at most. width: paths followed at each level of a dynamic tree, and next tokens of each path
    (EAGLE-2, section 4); 1 drafts a chain. The rest is as in `HeadProposer`. Raises ValueError as it does, for a depth
    or width below 1, and for a width with a fixed tree.
    """

    static = "eagle_25"

    @property
    def reads_all_features(self) -> bool:
        return True

    def __init__(
        self,
        head: EagleHead | Eagle3Head,
        *,
        depth: int = DEPTH,
        width: int | None = None,
        tree: str | Sequence[Ranks] = "dynamic",
        nodes: int | None = None,
        calibration: Calibration | None = None,
        sampled: bool = False,
    ) -> None:
        if width is not None and tree != "dynamic":
            raise ValueError(f"width is for a dynamic tree; {tree} has its own paths")
        self.width = self.ranks = WIDTH if width is None else width
        if depth < 1 or self.width < 1:
            raise ValueError(f"depth {depth} and width {self.width} must be at least 1")
        super().__init__(head, depth=depth, tree=tree, nodes=nodes, calibration=calibration, sampled=sampled)

    def start_drafter(self, step: Step, roots: Tensor) -> EagleDrafter:
        """Read the features that are new, each with the token after it; the root is the last of these."""
        features, counts = self._history.take_unread()
        features, cache = features.to(self.dtype), self._history.cache
        # Forget the last draft's own features.
        cache.crop([len(text) - 1 - count for text, count in zip(step.sequences, counts, strict=True)])
        following = [torch.tensor(text[-count:]) for text, count in zip(step.sequences, counts, strict=True)]
        tokens = pad_sequence(following, batch_first=True).to(features.device)  # [B, T]
        embed = self.embedding(step.target)
        states = []
        for part, kept in split_in_chunks(counts):
            fused = self.head.fuse(features[:, part])
            positions = cache.positions(fused.shape[1], fused.device)
            states.append(self.head(embed(tokens[:, part]), fused, positions, context=cache))
            cache.keep(kept)
        return EagleDrafter(self.head, pick_last(torch.cat(states, dim=1), counts), cache, embed)


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
