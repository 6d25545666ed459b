"""The target's features that a head has read, and those that it has not.

Shapes: B rows, T tokens, F feature width, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode import Step
from decode.devices.attention import attend
from decode.devices.graph import MOST_KEPT
from decode.devices.transfer import copy_packed, waits
from heads import LayerCache

READ_AT_ONCE = 512  # tokens per row and pass of a head while it reads a prompt
FEW = 32  # up to so many features, one pass for all states is as fast as keys and values first
WAITING = 256  # steps whose features are kept apart
MOST_UNREAD = 1 << 27  # bytes of features that wait for a draft
Counts: TypeAlias = list[int]  # of features, by row
Places: TypeAlias = list[int | None]  # by row: its row of a `FeaturePart`; None: that has none of its features
# A head reads features and the tokens after them, and adds both to its cache. Returns its states [B, T, H], or anything
# where only keys and values are needed, as the last argument tells.
ReadFeatures: TypeAlias = Callable[[LayerCache, "FeaturePart", bool], Tensor]


class FeatureHistory:
    """The target's features of a batch, for heads that attend to all of them.

    Those the head has read are in its cache. The others wait: a step without a draft takes no pass of the head, until
    they take too much memory.
    window: of the head's layers. unread_counts: each row's number of features that the head has not read.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.cache = self.make_cache(0)
        self._unread: list[tuple[FeaturePart, Places]] = []  # of each step
        self.unread_counts: Counts = []
        self._is_new: list[bool] = []  # by row: its prompt is not read, and is to be read apart from others' features

    def _begin(self, rows: int, like: Tensor) -> None:
        """Begin a batch. A GPU's cache stays where it is, because graphs write to it."""
        self._unread, self.unread_counts, held = [], [0] * rows, self.cache.held
        self._is_new = [rows > 1 and not waits(like)] * rows
        if held is not None and held[0].device == like.device and waits(held[0]) and held[0].shape[2] <= MOST_KEPT:
            self.cache.restart(rows)
        else:
            self.cache = self.make_cache(rows)

    def drop_unread(self) -> None:
        """Free the features that the head has not read. A new batch begins."""
        self._unread, self.unread_counts = [], []

    def make_cache(self, rows: int) -> LayerCache:
        """An empty cache for the head's layers."""
        return LayerCache(rows, attend_like_target, self.window)

    def add(self, step: Step, read: ReadFeatures) -> None:
        """Take in a step's features. read: reads what has waited for long."""
        assert step.features is not None and step.upload is not None
        numbers, stayed, counts = step.upload, step.stayed, [*map(len, step.committed)]
        features = step.features
        if (longest := max(counts)) < features.shape[1]:  # a row with a longer prompt has ended
            features = features[:, :longest].clone()
        part = FeaturePart(features, numbers["following"], numbers["counts"], counts)
        if step.is_first:
            self._begin(len(counts), features)
        elif len(stayed) < len(self.cache.lengths):
            self.cache.select(stayed)
            self._is_new = [self._is_new[row] for row in stayed]
            self.unread_counts = [self.unread_counts[row] for row in stayed]
            moved = [(each, [places[row] for row in stayed]) for each, places in self._unread]
            self._unread = [pair for pair in moved if any(place is not None for place in pair[1])]
        if stayed and (joined := len(step.joined)):
            self.cache.add_rows(joined)
            self._is_new += [True] * joined
            self.unread_counts += [0] * joined
            self._unread = [(each, [*places, *[None] * joined]) for each, places in self._unread]
        self._unread.append((part, [*range(len(counts))]))
        self.unread_counts = [*map(add, self.unread_counts, counts)]
        padded = len(counts) * max(self.unread_counts) * features[0, 0].nbytes  # together, as they are read
        if max(padded, sum(each.features.nbytes for each, _ in self._unread)) > MOST_UNREAD:
            self.read_but_last(read)
        elif len(self._unread) > WAITING:
            self._unread = [(self._join(range(len(counts))), [*range(len(counts))])]

    def read_prompts(self, read: ReadFeatures) -> None:
        """Let a head read the prompts that are new, but for each one's last feature.

        Call it before other features are read: else all rows would be padded to these prompts. On a CPU, where padding
        takes time, prompts are read one by one.
        """
        if new := [row for row, is_new in enumerate(self._is_new) if is_new]:
            self._is_new = [False] * len(self._is_new)
            together = any(waits(part.features) for part, _ in self._unread)
            for rows in [new] if together else [[row] for row in new]:
                self._read_rows(rows, read)

    def _read_rows(self, rows: Sequence[int], read: ReadFeatures) -> None:
        """Let a head read the features of rows that it has read nothing of, but for each one's last."""
        unread, cache = self._join(rows), self.make_cache(len(rows))
        prompts = unread.without_last()
        if max(prompts.counts):
            read_part(prompts, cache, read, keys_alone=True)
            self.cache.fill(rows, cache)
        self._unread = [
            (part, [None if row in rows else place for row, place in enumerate(places)])
            for part, places in self._unread
        ]
        places = [rows.index(row) if row in rows else None for row in range(len(self._is_new))]
        self._unread.append((unread.after(prompts.counts), places))
        self.unread_counts = [1 if row in rows else count for row, count in enumerate(self.unread_counts)]

    def take(self) -> FeaturePart:
        """The features that the head has not read, to be read now."""
        rows = range(len(self.unread_counts))
        unread, self._unread, self.unread_counts = self._join(rows), [], [0] * len(rows)
        return unread

    def _join(self, rows: Sequence[int]) -> FeaturePart:
        """The features of some rows that the head has not read."""
        parts = [(part, [places[row] for row in rows]) for part, places in self._unread]
        if len(parts) == 1 and parts[0][1] == [*range(len(parts[0][0].counts))]:
            return parts[0][0]
        counts = [self.unread_counts[row] for row in rows]

        def join(name: str) -> Tensor:
            found = ([part.row(name, places[row]) for part, places in parts] for row in range(len(rows)))
            return pad_sequence([torch.cat(row) for row in found], batch_first=True)

        features = join("features")
        numbers = copy_packed({"counts": torch.tensor(counts)}, features.device)
        return FeaturePart(features, join("following"), numbers["counts"], counts)

    def read_but_last(self, read: ReadFeatures) -> None:
        """Let a head read the features that it has not read, but for each row's last one."""
        self.read_prompts(read)
        unread = self.take()
        before = unread.without_last()
        if max(before.counts):
            read_part(before, self.cache, read, keys_alone=True)
        self._unread = [(unread.after(before.counts), [*range(len(before.counts))])]
        self.unread_counts = [1] * len(before.counts)

    def read_all(self, read: ReadFeatures, has_fast_keys: bool = False) -> Tensor:
        """Let a head read the features that it has not read; returns each row's last state [B, H].

        has_fast_keys: it reads keys and values alone in less time.
        """
        if has_fast_keys and max(self.unread_counts) > FEW:
            self.read_but_last(read)
        else:
            self.read_prompts(read)
        unread = self.take()
        return pick_last(read_part(unread, self.cache, read), unread.counts_tensor)


@dataclass(frozen=True)
class FeaturePart:
    """Features of one or more steps, padded at the right."""

    features: Tensor  # [B, T, F]
    following: Tensor  # [B, T]: the token after each
    counts_tensor: Tensor  # [B]
    counts: Counts  # the same: features of each row

    def row(self, name: str, place: int | None) -> Tensor:
        """Features of a row, or what follows them; none for no place."""
        tensor: Tensor = getattr(self, name)
        return tensor[0, :0] if place is None else tensor[place, : self.counts[place]]

    def without_last(self) -> FeaturePart:
        """The same without each row's last feature."""
        counts = [count - 1 for count in self.counts]
        return FeaturePart(self.features[:, :-1], self.following[:, :-1], self.counts_tensor - 1, counts)

    def after(self, starts: Counts) -> FeaturePart:
        """The same without the first `starts[b]` features of each row."""
        counts = [count - start for count, start in zip(self.counts, starts, strict=True)]
        first = torch.tensor(starts).to(self.features.device)
        column = first[:, None] + torch.arange(max(counts), device=first.device)  # [B, T]
        column = column.clamp(max=self.features.shape[1] - 1)
        features = self.features.gather(1, expand_last(column, self.features))
        return FeaturePart(features, self.following.gather(1, column), self.counts_tensor - first, counts)


def read_part(part: FeaturePart, cache: LayerCache, read: ReadFeatures, keys_alone: bool = False) -> Tensor:
    """Let a head read features into its cache, some in a pass. Returns as `ReadFeatures`."""
    if max(part.counts) <= READ_AT_ONCE:
        return read(cache, part, keys_alone)
    states = []
    for begin in range(0, max(part.counts), READ_AT_ONCE):
        columns = slice(begin, begin + READ_AT_ONCE)
        counts = (part.counts_tensor - begin).clamp(0, READ_AT_ONCE)
        sizes = [min(max(count - begin, 0), READ_AT_ONCE) for count in part.counts]
        some = FeaturePart(part.features[:, columns], part.following[:, columns], counts, sizes)
        states.append(read(cache, some, keys_alone))
    return part.features if keys_alone else torch.cat(states, dim=1)


def attend_like_target(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """`heads.layer_cache.attend` as the target computes it. The mask is in the queries' dtype."""
    return attend(queries, keys, values, mask, queries.shape[3] ** -0.5).transpose(1, 2)


def pick_last(states: Tensor, counts: Tensor) -> Tensor:
    """Each row's last state [B, H], from states [B, T, H] of `counts` [B] tokens a row."""
    return states.gather(1, expand_last((counts - 1)[:, None], states))[:, 0]


def expand_last(index: Tensor, like: Tensor) -> Tensor:
    """Indices [B, W] of whole vectors, for `gather` from `like` [B, *, H]."""
    return index[..., None].expand(-1, -1, like.shape[2])
