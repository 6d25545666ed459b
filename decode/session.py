"""One batch in decoding: what the target has in its KV cache, and the forward pass over the next tree.

Shapes: B rows, N nodes, V vocabulary, H hidden size, F = H x the number of captured layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.kv_cache import TreeCache
from decode.masks import tree_masks
from decode.models.features import capture_features
from decode.models.stock_model import StockModel
from decode.tree import Tree

CHUNK = 512  # tokens a row and forward pass, where many are committed at once
GROUP = 16  # rows a forward pass, there
ALIKE = 32  # rows of a group differ in length by less than this: padding is computed like any token


@dataclass(frozen=True)
class Verdict:
    """What the target says of a tree: `logits` [B, N, V] and, if layers were named, `features` [B, N, F]."""

    logits: Tensor
    features: Tensor | None

    def select(self, rows: Sequence[int]) -> Verdict:
        """The same for some rows only."""
        return Verdict(self.logits[rows], None if self.features is None else self.features[rows])


class Session:
    """The target's KV cache for one batch. `verify` looks at a tree, `keep` commits a path of it."""

    def __init__(self, target: StockModel, batch: int, layers: Sequence[int] = ()) -> None:
        self.target = target
        self.layers = tuple(layers)
        # There torch's batched products read a cache without gaps twice as fast.
        self.cache = TreeCache(batch, gapless=target.device.type == "cpu" and target.dtype == torch.bfloat16)

    @property
    def lengths(self) -> list[int]:
        """The number of committed tokens of each row."""
        return self.cache.lengths

    @torch.no_grad()
    def verify(self, tree: Tree, *, start: int = 0, only: Sequence[int] | None = None) -> Verdict:
        """One forward pass over a tree, behind the committed tokens.

        `start`: the first `start` nodes were verified by the call before and lie in the cache; only the rest is
        computed (a tree that grows level by level). `only`: the nodes whose logits are wanted, others are not
        computed; logits then have a row for each of them.
        """
        target, nodes = self.target, tree.width - start
        tree = tree.to(target.device)
        lengths = self.cache.place(start, nodes, target.device)
        masks = tree_masks(
            target.windows, lengths, tree.ancestors[:, start:], tree.depth, self.cache.used, target.dtype
        )
        positions = (lengths[:, None] + tree.depth[:, start:]).clamp(max=target.context - 1)
        extra: dict[str, Any] = {} if only is None else {"logits_to_keep": torch.tensor(only, device=target.device)}
        with capture_features(target.model, self.layers) as captured:
            output = target.model(
                input_ids=tree.tokens[:, start:],
                attention_mask=masks,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                **extra,
            )
        features = None
        if self.layers:
            features = torch.cat([captured[layer].to(target.device) for layer in self.layers], dim=-1)
        return Verdict(output.logits.to(target.device), features)

    def extend(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Commit tokens at the end of each row, at least one each.

        Returns the logits after each row's last token, [B, V], and the features of all of them, [B, T, F].
        """
        groups = _group(rows)
        if len(groups) == 1 or any(self.lengths):  # only new rows can be made apart from the others
            return self._extend_together(rows)
        logits: list[Tensor] = [torch.empty(0)] * len(rows)
        features: list[Tensor] = [torch.empty(0)] * len(rows)
        for places in groups:
            last, wide = self.renew(places, [rows[place] for place in places])
            for index, place in enumerate(places):
                logits[place] = last[index]
                if wide is not None:
                    features[place] = wide[index, : len(rows[place])]
        return torch.stack(logits), pad_sequence(features, batch_first=True) if self.layers else None

    def renew(self, places: Sequence[int], rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Forget the rows in these places and put new ones there, with the given tokens. Returns what `extend` does."""
        fresh = Session(self.target, len(rows), self.layers)
        result = fresh.extend(rows)
        self.cache.put(places, fresh.cache)
        return result

    def _extend_together(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """`extend` for all rows at once, `CHUNK` tokens of each a forward pass."""
        logits: list[Tensor] = [torch.empty(0)] * len(rows)
        features = []
        for begin in range(0, max(map(len, rows)), CHUNK):
            parts = [row[begin : begin + CHUNK] for row in rows]
            ending = [place for place, row in enumerate(rows) if begin < len(row) <= begin + CHUNK]
            last = sorted({len(parts[place]) - 1 for place in ending}) or [0]  # a model always gives some logits
            verdict = self.verify(Tree.chain(parts), only=last)
            self.keep([list(range(len(part))) for part in parts])
            for place in ending:
                logits[place] = verdict.logits[place, last.index(len(parts[place]) - 1)]
            if verdict.features is not None:
                features.append(verdict.features)
        return torch.stack(logits), torch.cat(features, dim=1) if features else None

    def keep(self, path: Sequence[Sequence[int]]) -> None:
        """Commit the nodes of each row's path (node numbers, root first); the rest of the tree is forgotten."""
        width = max(map(len, path), default=0)
        padded = [[*row, *range(len(row), width)] for row in path]
        self.cache.keep(torch.tensor(padded, dtype=torch.long), [len(row) for row in path])

    def crop(self, lengths: Sequence[int]) -> None:
        """Forget committed tokens beyond the given lengths, one a row."""
        self.cache.crop(lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only (their places in the batch, ascending)."""
        self.cache.select(rows)


def _group(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The places of the rows, those of like length together."""
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    groups: list[list[int]] = []
    for place in order:
        if not groups or len(groups[-1]) == GROUP or len(rows[place]) - len(rows[groups[-1][0]]) >= ALIKE:
            groups.append([])
        groups[-1].append(place)
    return groups
