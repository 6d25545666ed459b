"""What a head minimises on a batch: the loss of its draft tokens' distribution against the target's.

Shapes: B rows, T tokens, R anchors of all rows, A anchors of a row, K depths, F feature width, H hidden size, V
vocabulary.

An anchor is a committed token t whose feature a head drafts from. Token t + 1 is known already. Depth i predicts token
t + 2 + i; its training targets are at position t + 1 + i.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, repeat
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from training.draft_attention import (
    UnrolledContext,
    attend_to_block,
    attend_to_text,
    choose_anchors,
    gather_anchors,
)
from training.losses import find_acceptance, vocabulary_loss
from training.teacher import Batch

DECAY = 0.8  # Medusa, section 2.2.1
TTT_STEPS, REGRESSION = 3, 10.0  # of EAGLE heads
Decay: TypeAlias = float | Literal["pace"]
PACE: Literal["pace"] = "pace"
SMOOTHING = 0.5  # of D-PACE: a draft token counts as accepted with probability SMOOTHING + (1 - SMOOTHING) alpha
NESTED = 0.7  # the share of a draft's positions that have a further one, in training in one pass
ANCHORS = 0.5  # the share of anchors that a block is drafted after, in each step


@dataclass(frozen=True)
class Loss:
    """`total`, a sum over anchors, is minimised. By depth: the number of anchors, and for how many of them the head's
    most likely token is the target's or, with "ce", the text's."""

    total: Tensor
    anchors: Tensor  # [K]
    agreed: Tensor  # [K]


class Objective(nn.Module, ABC):
    """The loss over all draft depths. A module, so that it can be wrapped for several processes.

    embedding: the target's [V, H], for heads that read draft tokens. decay: the weight of each depth relative to the
    one before, or "pace" (see `_pace`). temperature: of both distributions, at most 1: the labels hold nearly all of
    the probability then.
    """

    reads_tokens: ClassVar[bool] = True  # drafts from embeddings, too
    options: ClassVar[tuple[str, ...]] = ()  # of `draftless train`, for it alone
    embedding: Tensor  # None if it reads no tokens
    draft_ids: Tensor

    def __init__(
        self,
        head: Any,
        loss: str,
        embedding: Tensor | None,
        decay: Decay = DECAY,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.head, self.loss, self.decay, self.temperature = head, loss, decay, temperature
        self.register_buffer("embedding", None if embedding is None else embedding.detach(), persistent=False)
        draft_ids = torch.full((head.vocab_size,), -1)
        tokens = torch.arange(head.vocab_size) if head.token_map is None else head.token_map.cpu()
        draft_ids[tokens] = torch.arange(head.draft_size)
        self.register_buffer("draft_ids", draft_ids, persistent=False)  # [V] token id -> draft id, or -1

    def forward(self, batch: Batch) -> Loss:
        batch = batch._replace(features=batch.features.to(next(self.head.parameters()).dtype))
        total = batch.features.new_zeros((), dtype=torch.float32)
        anchors, agreed = [], []
        drafts: Iterable[tuple[Tensor, Tensor, Tensor]] = self.draft(batch)
        weights: Iterable[Tensor | None] = repeat(None)
        if self.decay == PACE:
            drafts = [*drafts]
            weights = self._pace(batch, drafts)
        for depth, ((states, row, column), weight) in enumerate(zip(drafts, weights, strict=False)):
            loss, right = vocabulary_loss(self.loss, *self._prepare(batch, depth, states, row, column), weight)
            loss = loss + self.feature_loss(batch, states, row, column)
            total = total + (1 if self.decay == PACE else self.decay**depth / self.find_share(depth)) * loss
            anchors.append(len(row))
            agreed.append(right.sum())
        return Loss(total, torch.tensor(anchors, device=total.device), torch.stack(agreed))

    @abstractmethod
    def draft(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each depth: the states [R, H] of its anchors, and the rows and columns [R] of their training targets."""

    def feature_loss(self, batch: Batch, states: Tensor, row: Tensor, column: Tensor) -> Tensor | float:
        """An additional loss of the states [R, H], a sum over anchors."""
        return 0.0

    def find_share(self, depth: int) -> float:
        """The share of its anchors that a depth is drafted from: the expected loss is that of all."""
        return 1.0

    def output(self, batch: Batch, depth: int, states: Tensor, row: Tensor, column: Tensor) -> tuple[Any, ...]:
        """For the states [R, H] of a depth: the output layer's input, its matrices as for the loss, and its bias."""
        weight, bias = self.head.output_layer(depth)
        return self.head.normalise(states), [weight], bias

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings [..., H] of tokens [...]."""
        return nn.functional.embedding(tokens, self.embedding)

    @torch.no_grad()
    def _pace(self, batch: Batch, drafts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        """D-PACE's weights of the draft tokens, [R] for each depth: how many tokens of the draft are expected to be
        accepted from this one on.

        That is the derivative of all that are expected by the logarithm of its probability. A draft reaches a depth
        with the product of the probabilities above. A depth that is drafted from some of the anchors counts for all.
        """
        reached = torch.ones_like(batch.answers, dtype=torch.float32)  # by the anchor's place
        places, products = [], []
        for depth, (states, row, column) in enumerate(drafts):
            alpha = find_acceptance(*self._prepare(batch, depth, states, row, column)).float()
            place = row, column - 1 - depth
            product = torch.zeros_like(reached)
            product[place] = reached[place] * (SMOOTHING + (1 - SMOOTHING) * alpha)
            places.append(place)
            products.append(product / self.find_share(depth))
            reached = product
        sums = [*accumulate(reversed(products))]
        return [total[place] for total, place in zip(reversed(sums), places, strict=True)]

    def _prepare(
        self, batch: Batch, depth: int, states: Tensor, row: Tensor, column: Tensor
    ) -> tuple[Tensor, Sequence[Tensor], Tensor | None, Tensor, Tensor]:
        """The arguments of `vocabulary_loss` for the states [R, H] of a depth."""
        labels, p = batch.labels[row, column], batch.probabilities[row, column]
        if self.loss == "ce":
            labels = batch.tokens[row, column + 1][:, None]
            p = torch.ones_like(labels, dtype=torch.float32)
        states, weights, bias = self.output(batch, depth, states, row, column)
        if self.temperature != 1:
            p = (p.log() / self.temperature).softmax(dim=-1)
            states, bias = states / self.temperature, None if bias is None else bias / self.temperature
        return states, weights, bias, self.draft_ids[labels], p


class MedusaObjective(Objective):
    """The loss of a Medusa head. One head's logits are in memory at a time (Gloeckle et al.)."""

    head: Any
    reads_tokens = False

    def draft(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        row, column = batch.answers.nonzero(as_tuple=True)
        features = self.read(batch.features)[row, column]
        answers = nn.functional.pad(batch.answers, (0, self.head.depth + 1))
        for depth in range(self.head.depth):
            inside = answers[row, column + 1 + depth]
            row, column, features = row[inside], column[inside], features[inside]
            drafted = column[:, None] + torch.arange(1, depth + 2, device=column.device)
            yield self.compute(depth, features, batch.tokens[row[:, None], drafted]), row, column + 1 + depth

    def read(self, features: Tensor) -> Tensor:
        """What the heads read of texts' features [B, T, H], for each token."""
        return features

    def compute(self, depth: int, features: Tensor, tokens: Tensor) -> Tensor:
        """The states [R, H] of head `depth`, from what it reads [R, ...] and the draft tokens before its own."""
        states: Tensor = self.head.blocks[depth](features)
        return states


class MultiTokenObjective(MedusaObjective):
    """The loss of a multi-token head."""

    def read(self, features: Tensor) -> Tensor:
        positions = torch.arange(features.shape[1], device=features.device)[None]
        states: Tensor = self.head(features, positions, partial(attend_to_text, self.head.window))  # [B, T, K, H]
        return states

    def compute(self, depth: int, features: Tensor, tokens: Tensor) -> Tensor:
        return features[:, depth]


class HydraObjective(MedusaObjective):
    """The loss of a Hydra head."""

    reads_tokens = True

    def read(self, features: Tensor) -> Tensor:
        states: Tensor = self.head.contextualize(features)
        return states

    def compute(self, depth: int, features: Tensor, tokens: Tensor) -> Tensor:
        states: Tensor = self.head(features, self.embed(tokens), depth)
        return states


class EagleObjective(Objective):
    """The loss of an EAGLE head or MTP module over `steps` drafting steps from each anchor.

    The text's tokens are the draft tokens. Several steps are EAGLE-3's training-time test (Li et al., 2025, section
    3.2); their keys are HASS's harmonized context (Zhang et al., 2024, section 3.2). noise: half the width of the
    uniform noise added to the features of a text of 512 tokens; shorter texts get more (as in EAGLE's code).
    """

    options: ClassVar[tuple[str, ...]] = ("ttt_steps", "noise")
    text_steps: ClassVar[int] = 1  # drafting steps that a pass over whole texts makes from all their tokens

    def __init__(
        self,
        head: Any,
        loss: str,
        embedding: Tensor,
        decay: Decay = DECAY,
        temperature: float = 1.0,
        *,
        steps: int = TTT_STEPS,
        noise: float = 0.0,
    ) -> None:
        super().__init__(head, loss, embedding, decay, temperature)
        self.steps, self.noise = steps, noise

    def draft(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        columns, chosen = gather_anchors(batch.answers)
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        tokens, answers = (nn.functional.pad(part, (0, self.steps + 1)) for part in (batch.tokens, batch.answers))
        context = UnrolledContext(columns, self.head.window)
        positions = torch.arange(batch.tokens.shape[1], device=columns.device)[None]
        states = self.read_texts(batch._replace(tokens=tokens), positions, context)[rows, columns]
        for step in range(self.steps):
            if step >= self.text_steps:
                columns, chosen, states = self.begin_step(context, chosen, states)
                embedded, states = self.find_input(tokens[rows, columns + 1 + step], states)
                states = self.head(embedded, states, columns + 1 + step - self.text_steps, context.attend)
            chosen = chosen & answers[rows, columns + 1 + step]
            yield states[chosen], rows.expand_as(columns)[chosen], columns[chosen] + 1 + step

    def read_texts(self, batch: Batch, positions: Tensor, context: UnrolledContext) -> Tensor:
        """The states [B, T, H] that drafts begin with, at positions [1, T] of whole texts. Here these are the states of
        the first drafting step. The tokens are padded by more than one."""
        following = batch.tokens[:, 1 : positions.shape[1] + 1]
        fused = self.head.fuse(self._add_noise(batch.features))
        states: Tensor = self.head(self.embed(following), fused, positions, context.attend)
        return states

    def begin_step(self, context: UnrolledContext, chosen: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The anchors' columns [B, A], which of them count, and their states [B, A, H], for one more drafting step."""
        return context.columns, chosen, states

    def find_input(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The embeddings and states [B, A, H] that a drafting step reads, after the text's tokens [B, A]."""
        return self.embed(tokens), states

    def _add_noise(self, features: Tensor) -> Tensor:
        if not (self.noise and self.training):
            return features
        width = self.noise * 512 / features.shape[1]
        return features + (2 * torch.rand_like(features) - 1) * width


class RegressionObjective(EagleObjective):
    """The loss of an EAGLE-1 head, whose states are features.

    regression: the weight of the smooth L1 distance between states and the target's features, a mean over H (EAGLE,
    section 4.1: 10 times the token loss).
    """

    options = "ttt_steps", "noise", "regression"

    def __init__(self, *arguments: Any, regression: float = REGRESSION, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.regression = regression

    def feature_loss(self, batch: Batch, states: Tensor, row: Tensor, column: Tensor) -> Tensor | float:
        if not self.regression:
            return 0.0
        wanted = batch.features[row, column].to(states.dtype)
        distance = nn.functional.smooth_l1_loss(states, wanted, reduction="none").mean(dim=-1)
        return self.regression * distance.sum(dtype=torch.float32)


class JumpObjective(EagleObjective):
    """The loss of a jump head: its drafting steps attend to the text by the target's own states, from the first on.

    The squared distance between states and the target's, relative to the target's, is added to the token loss.
    """

    options, text_steps = ("ttt_steps",), 0

    def read_texts(self, batch: Batch, positions: Tensor, context: UnrolledContext) -> Tensor:
        context.add_text(*self.head.read(batch.features, positions))
        states: Tensor = self.head.above(batch.features)
        return states

    def feature_loss(self, batch: Batch, states: Tensor, row: Tensor, column: Tensor) -> Tensor:
        wanted = self.head.above(batch.features[row, column]).float()
        return ((states.float() - wanted).square().sum(dim=-1) / wanted.square().sum(dim=-1)).sum()


class PEagleObjective(EagleObjective):
    """The loss of a head that drafts in one pass: its steps read no draft tokens, but what stands for unknown ones.

    Each step is made from a random share of the anchors of the step before ("nested" sampling; P-EAGLE, section 3), so
    all of a draft's earlier positions are there, as they are when it drafts.
    """

    options = ()

    def __init__(self, head: Any, *arguments: Any, **settings: Any) -> None:
        super().__init__(head, *arguments, steps=head.depth, **settings)

    def find_share(self, depth: int) -> float:
        return NESTED**depth

    def begin_step(self, context: UnrolledContext, chosen: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        places, kept = choose_anchors(chosen, NESTED)
        context.select(places)
        return context.columns, kept, states

    def find_input(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        token, fused = self.head.unknown(1)
        return self.embed(token).expand(*tokens.shape, -1), fused.expand(*tokens.shape, -1)


class BlockObjective(Objective):
    """The loss of a block head: blocks after a share of all anchors, chosen anew in each step (DFlash, section 3).

    A block attends to the features up to its anchor and to itself. Its draft tokens are scored after the text's tokens,
    as the one before them is known when a tree grows.
    """

    def __init__(self, head: Any, *arguments: Any, **settings: Any) -> None:
        super().__init__(head, *arguments, **settings)
        if head.config.candidates or head.config.logit_factor != 1 or head.config.logit_cap is not None:
            raise ValueError("DFlash2 heads, and those with scaled or capped logits, cannot be trained here")

    def find_share(self, depth: int) -> float:
        return ANCHORS

    def draft(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        head, width = self.head, batch.tokens.shape[1]
        tokens, answers = (nn.functional.pad(part, (0, head.depth + 1)) for part in (batch.tokens, batch.answers))
        columns, chosen = choose_anchors(batch.answers & answers[:, 1 : width + 1], ANCHORS)
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        fused = head.fuse(batch.features)
        keys, values = head.read(fused, torch.arange(width, device=columns.device)[None])
        blocks = self.embed(head.begin_block(tokens[rows, columns + 1]))  # [B, A, R, H]
        places = columns[..., None] + 1 + torch.arange(head.rows, device=columns.device)
        attend = partial(attend_to_block, columns, places, (keys, values), head.config)
        states = head(blocks.flatten(1, 2), places.flatten(1), attend).unflatten(1, blocks.shape[1:3])
        for depth, each in enumerate(states[:, :, -head.depth :].unbind(2)):
            chosen = chosen & answers[rows, columns + 1 + depth]
            yield each[chosen], rows.expand_as(columns)[chosen], columns[chosen] + 1 + depth

    def output(self, batch: Batch, depth: int, states: Tensor, row: Tensor, column: Tensor) -> tuple[Any, ...]:
        states, weights, bias = super().output(batch, depth, states, row, column)
        if self.head.has_pairs:  # W h + V u is one output layer, whose matrix is [W V]
            pairs = self.head.markov_head
            before = pairs.markov_w1(batch.tokens[row, column])
            states, weights = torch.cat([states, before], dim=-1), [*weights, pairs.markov_w2.weight]
        return states, weights, bias


OBJECTIVES: dict[str, type[Objective]] = {  # by the kind of head
    "medusa": MedusaObjective,
    "multi-token": MultiTokenObjective,
    "hydra": HydraObjective,
    "eagle": RegressionObjective,
    "eagle3": EagleObjective,
    "peagle": PEagleObjective,
    "dflash": BlockObjective,
    "jump": JumpObjective,
    "mtp": EagleObjective,
}
