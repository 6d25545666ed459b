"""What the drafts of heads attend to in training, where drafts from many places of a text are computed at once.

Shapes: B rows, T tokens, A anchors a row, S drafting steps so far, R tokens of a block, Q query heads, G key-value
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heads import DFlashConfig
from heads.layer_cache import attend, heads_of, hide, is_unseen


def choose_anchors(possible: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """A share of the columns where a mask [B, T] is true: the columns [B, A], padded to at least one a row, and which
    of them count.

    A row's number is rounded up or down by chance, so that short answers weigh no more than their share.
    """
    chance = torch.rand(len(possible), device=possible.device)
    counts = (possible.sum(dim=1) * share + chance).floor().long()
    order = (torch.rand(possible.shape, device=possible.device) + possible).sort(dim=1, descending=True).indices
    columns = order[:, : max(1, int(counts.max()))]
    return columns, torch.arange(columns.shape[1], device=columns.device) < counts[:, None]


def attend_to_block(
    columns: Tensor, places: Tensor, text: tuple[Tensor, Tensor], config: DFlashConfig, *given: Tensor, layer: int
) -> Tensor:
    """Attention of blocks at places [B, A, R] to their own rows, and to a text up to columns [B, A].

    text: the keys and values [B, layers x G, T, D] of all layers. given: the blocks' queries, keys and values.
    """
    queries, *own = given
    heads, (window, causal) = heads_of(layer, own[0]), config.find_sight(layer)
    slots = torch.arange(text[0].shape[2], device=columns.device)
    unseen = is_unseen(slots, columns[..., None, None], places[..., None], window)  # [B, A, 1 or R, T]
    blocks = [part.unflatten(2, places.shape[1:]) for part in own]  # [B, G, A, R, D]
    return attend_to_both(queries, [part[:, heads] for part in text], blocks, unseen, causal)


def attend_to_both(
    queries: Tensor, text: Sequence[Tensor], own: Sequence[Tensor], unseen: Tensor, causal: bool = False
) -> Tensor:
    """Attention of rows that go on from several places of a text: to the text, and to the rows of the same place.

    queries [B, Q, A x R, D]; text: keys and values [B, G, T, D]; own: keys and values [B, G, A, S, D] of the places.
    unseen [B, A, 1 or R, T]: what a row does not see of the text. causal: nor of the S rows, those after its own.
    """
    (keys, values), (own_keys, own_values), anchors = text, own, own[0].shape[2]
    grouped = queries.unflatten(1, (keys.shape[1], -1)) * queries.shape[3] ** -0.5  # [B, G, Q/G, A R, D]
    wide, shape, hidden = torch.promote_types(queries.dtype, torch.float32), grouped.shape[2:4], float("-inf")
    scores = (grouped.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, shape).to(wide)
    blocks = grouped.unflatten(3, (anchors, -1))  # [B, G, Q/G, A, R, D]
    unseen = unseen.expand(-1, -1, blocks.shape[4], -1).flatten(1, 2)
    scores = scores.masked_fill(unseen[:, None, None], hidden)
    own_scores = (blocks @ own_keys[:, :, None].transpose(-1, -2)).to(wide)  # [B, G, Q/G, A, R, S]
    if causal:
        later = torch.ones(own_scores.shape[4:], device=own_scores.device).triu(1).bool()
        own_scores = own_scores.masked_fill(later, hidden)
    weights = torch.cat([scores, own_scores.flatten(3, 4)], dim=-1).softmax(dim=-1).to(values.dtype)
    to_text, to_own = weights.split([scores.shape[-1], own_scores.shape[-1]], dim=-1)
    mixed = (to_text.flatten(2, 3) @ values).unflatten(2, shape)
    mixed = mixed + (to_own.unflatten(3, (anchors, -1)) @ own_values[:, :, None]).flatten(3, 4)
    return mixed.flatten(1, 2)


def gather_anchors(answers: Tensor) -> tuple[Tensor, Tensor]:
    """The columns [B, A] where a mask [B, T] is true, in order, padded to at least one; and which of them are true."""
    most = max(1, int(answers.sum(dim=1).max()))
    columns = answers.logical_not().sort(dim=1, stable=True).indices[:, :most]
    return columns, answers.gather(1, columns)


def attend_to_text(window: int | None, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of all tokens of texts to those before them, within the window."""
    if window is None:
        return attend(queries, keys, values)
    slots = torch.arange(keys.shape[2], device=keys.device)
    hidden = is_unseen(slots, slots[:, None], slots[:, None], window)
    return attend(queries, keys, values, hide(hidden, queries.dtype)[None, None])


class UnrolledContext:
    """The keys and values that a head's layers attend to when drafts from all anchors are unrolled at once.

    The first pass is over whole texts, unless `add_text` gives what they leave. Each later pass is one drafting step
    from the anchors `columns` [B, A], which attends to the text up to its anchor and to its own draft: T + S scores per
    query, not T x S as with one mask.
    window: of `LayerConfig`.
    """

    def __init__(self, columns: Tensor, window: int | None = None) -> None:
        self.columns, self.window = columns, window
        self.text: list[tuple[Tensor, Tensor]] = []  # of each layer
        self.drafts: list[list[tuple[Tensor, Tensor]]] = []  # of each layer, by drafting step

    def add_text(self, keys: Tensor, values: Tensor) -> None:
        """Take those of whole texts for the next layer."""
        self.text.append((keys, values))
        self.drafts.append([])

    def select(self, places: Tensor) -> None:
        """Go on with some of the anchors, by their places [B, A]."""
        self.columns = self.columns.gather(1, places)
        self.drafts = [[(pick(keys, places), pick(values, places)) for keys, values in one] for one in self.drafts]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, layer: int = 0) -> Tensor:
        """See `heads.layer_cache.Attend`."""
        if layer == len(self.text):
            self.add_text(keys, values)
            return attend_to_text(self.window, queries, keys, values)
        drafts = self.drafts[layer]
        drafts.append((keys, values))
        last, slots = self.columns[..., None, None], torch.arange(self.text[layer][0].shape[2], device=keys.device)
        unseen = is_unseen(slots, last, last + len(drafts), self.window)  # [B, A, 1, T]
        own = [torch.stack(parts, dim=3) for parts in zip(*drafts, strict=True)]  # [B, G, A, S, D]
        return attend_to_both(queries, self.text[layer], own, unseen)


def pick(part: Tensor, places: Tensor) -> Tensor:
    """Keys or values [B, G, A, D] at places [B, A] of their anchors."""
    return part.gather(2, places[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]))
