"""Drafting with Hydra heads: level by level, each guess knowing those before it on its path.

After Ankner et al., "Hydra" (2024). Shapes: B rows, W paths, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode import Step, Target
from heads import HydraHead, LayerCache
from proposers.packing import Logits
from proposers.trained import TrainedProposer


class HydraProposer(TrainedProposer):
    """Drafts with a `HydraHead`, one pass of it a level. A prefix layer (Hydra++) has its own cache, a row a text."""

    width = 8

    def observe(self, step: Step) -> None:
        super().observe(step)
        if step.first:
            self._cache, self._new = LayerCache(len(step.rows)), [list[Tensor]() for _ in step.rows]
        elif len(step.kept) < len(self._new):
            self._cache.select(step.kept)
            self._new = [self._new[row] for row in step.kept]
        if self.head.prefix is not None:
            assert step.features is not None
            for new, features, tokens in zip(self._new, step.features, step.committed, strict=True):
                new.append(features[: len(tokens)])

    def features(self) -> Tensor:
        """What the prefix layer, where there is one, makes of all that was committed since it last ran."""
        if self.head.prefix is None:
            return super().features()
        new = [torch.cat(parts) for parts in self._new]
        counts = [len(part) for part in new]
        features = self.head.contextualize(pad_sequence(new, batch_first=True).to(self.dtype), self._cache, counts)
        self._new = [[] for _ in new]
        last = torch.tensor(counts, device=features.device) - 1
        return features[torch.arange(len(last), device=features.device), last]

    def ground(self, features: Tensor) -> Tensor:
        return self.head.contextualize(super().ground(features))

    def guess(self, features: Tensor, roots: Tensor, target: Target) -> HydraGuesses:
        return HydraGuesses(self.head, self.logits, features, roots, target.model.get_input_embeddings())

    def _pays(self, scores: Tensor) -> bool:
        """A level is a pass of the head: not where the paths that it would go on from are all but surely wrong."""
        return self.pace.pays(float(scores.exp().sum()) / len(scores))


class HydraGuesses:
    """One step's guesses for features [B, H] and roots [B]; `embed` makes the target's embeddings of tokens."""

    def __init__(
        self, head: HydraHead, logits: Logits, features: Tensor, roots: Tensor, embed: Callable[[Tensor], Tensor]
    ) -> None:
        self.head, self.readout, self.tokens = head, logits, head.tokens
        self.features, self.embed = features, embed
        self.paths = self._embed(roots[:, None])[:, :, None]  # [B, W, level + 1, H]

    def logits(self, level: int) -> Tensor:
        features = self.features[:, None].expand(-1, self.paths.shape[1], -1)
        return self.readout(self.head(features, self.paths, level), level)

    def follow(self, origin: Tensor, tokens: Tensor) -> None:
        index = origin[:, :, None, None].expand(-1, -1, *self.paths.shape[2:])
        self.paths = torch.cat([self.paths.gather(1, index), self._embed(tokens)[:, :, None]], dim=2)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens).to(self.features.dtype)
