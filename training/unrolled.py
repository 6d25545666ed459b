"""Drafting from many tokens of a text at once, so that a head learns on what it will meet: its own states.

EAGLE-3's training-time test (Li et al., 2025, 3.2); the same keys, shifted, are HASS's harmonised context (Zhang et
al., 2024, 3.2). Shapes: B rows, T tokens, A anchors (tokens where a draft begins), Q query heads, G key-value heads, D
head size, S drafting steps so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.layer_cache import attend


class Unrolled:
    """What a head looks back on. Its first pass is over whole texts; each later one is a drafting step from `columns`
    [B, A], the anchors. Such a step sees the text up to its own anchor, and its own draft: one token a step.

    So a step costs T + S scores a query, where a mask over the steps side by side would cost T x S.
    """

    def __init__(self, columns: Tensor) -> None:
        self.columns = columns
        self.text: tuple[Tensor, Tensor] | None = None
        self.drafts: list[tuple[Tensor, Tensor]] = []

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """See `heads.layer_cache.AttentionContext`; the mask is this object's to know."""
        if self.text is None:
            self.text = keys, values
            return attend(queries, keys, values, mask)
        self.drafts.append((keys, values))
        count, size = queries.shape[2:]
        grouped = queries.unflatten(1, (keys.shape[1], -1)) * size**-0.5  # [B, G, Q/G, A, D]
        weights = self._weigh(grouped).split([self.text[0].shape[2], len(self.drafts)], dim=-1)
        mixed = (weights[0].flatten(2, 3) @ self.text[1]).unflatten(2, (-1, count))
        for (_, own), weight in zip(self.drafts, weights[1].unbind(-1), strict=True):
            mixed = mixed + weight[..., None] * own[:, :, None]
        return mixed.flatten(1, 2)

    def _weigh(self, grouped: Tensor) -> Tensor:
        """What queries [B, G, Q/G, A, D] take of each token of the text and of their draft, [B, G, Q/G, A, T + S]."""
        assert self.text is not None
        count = grouped.shape[3]
        scores = (grouped.flatten(2, 3) @ self.text[0].transpose(-1, -2)).unflatten(2, (-1, count)).float()
        past = torch.arange(scores.shape[-1], device=scores.device) <= self.columns[..., None]  # [B, A, T]
        own = [(grouped * keys[:, :, None]).sum(dim=-1, keepdim=True).float() for keys, _ in self.drafts]
        weights = torch.cat([scores.masked_fill(~past[:, None, None], float("-inf")), *own], dim=-1).softmax(dim=-1)
        return weights.to(grouped.dtype)
