"""The target's features that a head has read, and those that it has not.

Shapes: B rows, T tokens, F feature width, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode import Step
from decode.gpu.graph import MOST_KEPT
from decode.gpu.transfer import Upload, copy_packed
from decode.models.grouped_attention import attend_grouped
from heads import LayerCache

CHUNK = 512  # tokens per row and pass of a head while it reads a prompt


class FeatureHistory:
    """The target's features of a batch, for heads that attend to all of them.

    Those the head has read are in its cache. The others wait: a step without a draft takes no pass of the head.
    """

    def __init__(self) -> None:
        self.cache, self._unread = LayerCache(0), list[FeaturePart]()

    def _begin(self, rows: int, device: torch.device) -> None:
        """Begin a batch. A GPU's cache of as many rows stays where it is, because graphs write to it."""
        self._unread = []
        keys = self.cache.keys
        fits = keys is not None and (len(keys), keys.device) == (rows, device) and keys.shape[2] <= MOST_KEPT
        if fits and device.type == "cuda":
            self.cache.restart()
        else:
            self.cache = LayerCache(rows, attend_like_target)

    def add(self, step: Step, features: Tensor) -> None:
        """Take in a step's features as the head attends to them."""
        if step.is_prefill:
            self._begin(len(step.request_ids), features.device)
        elif len(step.kept) < len(self.cache.lengths):
            self.cache.select(step.kept)
            self._unread = [part.select(step.kept) for part in self._unread]
        numbers, counts = numbers_of(step), [len(tokens) for tokens in step.committed]
        features = features[:, : max(counts)]  # a row with a longer prompt may have ended
        self._unread.append(FeaturePart(features, numbers["following"], numbers["counts"], counts))

    @property
    def unread_counts(self) -> list[int]:
        """Each row's number of features that the head has not read."""
        return [sum(each) for each in zip(*(part.counts for part in self._unread), strict=True)]

    def take(self) -> FeaturePart:
        """The features that the head has not read, to be read now."""
        unread, self._unread = join_parts(self._unread), []
        return unread

    def read(self, dtype: torch.dtype, read: Callable[[Tensor, Tensor, list[int], Tensor | None], Tensor]) -> Tensor:
        """Let a head read the features that it has not read; returns each row's last state [B, H].

        read: maps features [B, T, F], padded at the right, and the tokens [B, T] after them, the root last, to states
        [B, T, H], and adds these to the cache. It also gets each row's number of features: as a list, and as a tensor
        [B] if all are read at once.
        """
        unread = self.take()
        counts, features = unread.counts, unread.features.to(dtype)
        if max(counts) <= CHUNK:
            return pick_last(read(features, unread.following, counts, unread.counts_tensor), unread.counts_tensor)
        states = []
        for begin in range(0, max(counts), CHUNK):
            part = slice(begin, begin + CHUNK)
            sizes = [min(max(count - begin, 0), CHUNK) for count in counts]
            states.append(read(features[:, part], unread.following[:, part], sizes, None))
        return pick_last(torch.cat(states, dim=1), unread.counts_tensor)


@dataclass(frozen=True)
class FeaturePart:
    """Features of one or more steps, padded at the right."""

    features: Tensor  # [B, T, F]
    following: Tensor  # [B, T]: the token after each
    counts_tensor: Tensor  # [B]
    counts: list[int]  # the same: features of each row

    def select(self, rows: Sequence[int]) -> FeaturePart:
        """The same for some rows only."""
        index = copy_packed({"rows": torch.tensor(rows)}, self.features.device)["rows"]
        counts = [self.counts[row] for row in rows]
        return FeaturePart(self.features[index], self.following[index], self.counts_tensor[index], counts)


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


def numbers_of(step: Step) -> Upload:
    """The step's numbers on the device, which the loop gives to every proposer that names layers."""
    assert step.upload is not None
    return step.upload


def attend_like_target(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """`heads.layer_cache.attend` as the target computes it. The mask is in the queries' dtype."""
    return attend_grouped(queries, keys, values, mask, queries.shape[3] ** -0.5).transpose(1, 2)


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
