"""The target's features that a head has read, and those that it has not.

Shapes: B rows, T tokens, F feature width, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from decode import Step
from decode.devices.attention import attend
from decode.devices.graph import MOST_KEPT
from decode.devices.transfer import copy_packed, waits
from heads import LayerCache
from proposers.tree_proposer import numbers_of

READ_AT_ONCE = 512  # tokens per row and pass of a head while it reads a prompt
WAITING = 256  # steps whose features wait for a draft at most: they take memory, and are copied as rows come and go
Counts: TypeAlias = list[int]  # of features, by row
# A head reads features and the tokens after them, and adds both to its cache. Returns its states [B, T, H].
ReadFeatures: TypeAlias = Callable[[LayerCache, "FeaturePart"], Tensor]


class FeatureHistory:
    """The target's features of a batch, for heads that attend to all of them.

    Those the head has read are in its cache. The others wait: a step without a draft takes no pass of the head, until
    `WAITING` such steps.
    window: of the head's layers.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.cache, self._unread = self.make_cache(0), list[FeaturePart]()
        self._is_new: list[bool] = []  # by row: it has joined others, and its prompt is not read
        self._steps = 0  # whose features wait

    def _begin(self, rows: int, device: torch.device) -> None:
        """Begin a batch. A GPU's cache stays where it is, because graphs write to it."""
        self._unread, self._steps, self._is_new, held = [], 0, [False] * rows, self.cache.held
        if held is not None and held[0].device == device and waits(held[0]) and held[0].shape[2] <= MOST_KEPT:
            self.cache.restart(rows)
        else:
            self.cache = self.make_cache(rows)

    def make_cache(self, rows: int) -> LayerCache:
        """An empty cache for the head's layers."""
        return LayerCache(rows, attend_like_target, self.window)

    def add(self, step: Step, read: ReadFeatures) -> None:
        """Take in a step's features. read: reads what has waited for long."""
        assert step.features is not None
        numbers, stayed, counts = numbers_of(step), step.stayed, [*map(len, step.committed)]
        features = step.features[:, : max(counts)]  # a row with a longer prompt may have ended
        part = FeaturePart(features, numbers["following"], numbers["counts"], counts)
        if step.is_first:
            self._begin(len(counts), features.device)
        elif len(stayed) < len(self.cache.lengths):
            self.cache.select(stayed)
            self._is_new = [self._is_new[row] for row in stayed]
            self._unread = [join_parts(self._unread).select(stayed)] if self._unread else []
        if stayed and step.joined:
            self.cache.add_rows(len(step.joined))
            self._is_new += [True] * len(step.joined)
            self._unread = [join_parts(self._unread).add_rows(len(step.joined))] if self._unread else []
        self._unread.append(part)
        if any(self._is_new) and max(counts) > READ_AT_ONCE:  # it would take much memory, as padding of all rows
            self.read_prompts(read)
        self._steps += 1
        if self._steps > WAITING:
            self.read_but_last(read)

    def read_prompts(self, read: ReadFeatures) -> None:
        """Let a head read the prompts of requests that have joined others, but for each one's last feature.

        Call it before other features are read: else all rows would be padded to these prompts.
        """
        if new := [row for row, is_new in enumerate(self._is_new) if is_new]:
            self._is_new = [False] * len(self._is_new)
            unread, starts = join_parts(self._unread), [0] * len(self._is_new)
            prompts, cache = unread.select(new).without_last(), self.make_cache(len(new))
            if longest := max(prompts.counts):
                read_part(prompts.first(longest), cache, read)
                self.cache.fill(new, cache)
            for row, count in zip(new, prompts.counts, strict=True):
                starts[row] = count
            self._unread = [unread.after(starts)]

    @property
    def unread_counts(self) -> list[int]:
        """Each row's number of features that the head has not read."""
        return [sum(each) for each in zip(*(part.counts for part in self._unread), strict=True)]

    def take(self) -> FeaturePart:
        """The features that the head has not read, to be read now."""
        unread, self._unread, self._steps = join_parts(self._unread), [], 0
        return unread

    def read_but_last(self, read: ReadFeatures) -> None:
        """Let a head read the features that it has not read, but for each row's last one."""
        self.read_prompts(read)
        unread = self.take()
        before = unread.without_last()
        if max(before.counts):
            read_part(before, self.cache, read)
        self._unread = [unread.after(before.counts)]

    def read_all(self, read: ReadFeatures) -> Tensor:
        """Let a head read the features that it has not read; returns each row's last state [B, H]."""
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

    def select(self, rows: Sequence[int]) -> FeaturePart:
        """The same for some rows only."""
        index = copy_packed({"rows": torch.tensor(rows)}, self.features.device)["rows"]
        counts = [self.counts[row] for row in rows]
        return FeaturePart(self.features[index], self.following[index], self.counts_tensor[index], counts)

    def first(self, count: int) -> FeaturePart:
        """The same without padding, for rows of at most so many features."""
        return FeaturePart(self.features[:, :count], self.following[:, :count], self.counts_tensor, self.counts)

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

    def add_rows(self, count: int) -> FeaturePart:
        """The same with more rows, which have no features."""
        features, following = pad(self.features, (0, 0, 0, 0, 0, count)), pad(self.following, (0, 0, 0, count))
        return FeaturePart(features, following, pad(self.counts_tensor, (0, count)), [*self.counts, *[0] * count])


def read_part(part: FeaturePart, cache: LayerCache, read: ReadFeatures) -> Tensor:
    """Let a head read features into its cache, some in a pass. Returns the states [B, T, H]."""
    if max(part.counts) <= READ_AT_ONCE:
        return read(cache, part)
    states = []
    for begin in range(0, max(part.counts), READ_AT_ONCE):
        columns = slice(begin, begin + READ_AT_ONCE)
        counts = (part.counts_tensor - begin).clamp(0, READ_AT_ONCE)
        sizes = [min(max(count - begin, 0), READ_AT_ONCE) for count in part.counts]
        states.append(read(cache, FeaturePart(part.features[:, columns], part.following[:, columns], counts, sizes)))
    return torch.cat(states, dim=1)


def join_parts(parts: Sequence[FeaturePart]) -> FeaturePart:
    """Several steps' features one after another in each row."""
    if len(parts) == 1:
        return parts[0]
    counts = [sum(each) for each in zip(*(part.counts for part in parts), strict=True)]

    def join(name: str) -> Tensor:
        rows = ([getattr(part, name)[row, : part.counts[row]] for part in parts] for row in range(len(counts)))
        return pad_sequence([torch.cat(row) for row in rows], batch_first=True)

    together = torch.stack([part.counts_tensor for part in parts]).sum(dim=0)
    return FeaturePart(join("features"), join("following"), together, counts)


def attend_like_target(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """`heads.layer_cache.attend` as the target computes it. The mask is in the queries' dtype."""
    return attend(queries, keys, values, mask, queries.shape[3] ** -0.5).transpose(1, 2)


def pick_last(states: Tensor, counts: Tensor) -> Tensor:
    """Each row's last state [B, H], from states [B, T, H] of `counts` [B] tokens a row."""
    return states.gather(1, expand_last((counts - 1)[:, None], states))[:, 0]


def expand_last(index: Tensor, like: Tensor) -> Tensor:
    """Indices [B, W] of whole vectors, for `gather` from `like` [B, *, H]."""
    return index[..., None].expand(-1, -1, like.shape[2])


def pick_last_features(step: Step) -> Tensor:
    """The features [B, F] of each row's last committed token."""
    assert step.features is not None
    return pick_last(step.features, numbers_of(step)["counts"])
