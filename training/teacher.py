"""What a head learns from: the frozen target's features and what it says would come next.

Shapes: B rows, T tokens, F feature width, S labels (the likeliest tokens), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from decode import Target
from decode.models.features import capture_features
from training.data import Example

ROWS = 256  # answer rows whose logits are looked at at a time
LABELS = 48  # of the target's law, so many tokens are kept; on chat answers they hold over 0.99 of it


@dataclass(frozen=True)
class Lesson:
    """A batch of texts with the target's view of them, padded at the end of each row.

    Row t of the labels is what the target says after token t: its likeliest tokens, and their probabilities at
    temperature 1. `answers` marks the rows t whose next token, t + 1, belongs to an answer; others have no labels.
    """

    tokens: Tensor  # [B, T] long
    answers: Tensor  # [B, T] bool
    features: Tensor  # [B, T, F]
    labels: Tensor  # [B, T, S] long
    chances: Tensor  # [B, T, S] float32

    def to(self, device: torch.device) -> Lesson:
        return Lesson(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))


@dataclass(frozen=True)
class View:
    """The target's view of one example: `features` [T, F], and `labels`, `chances` [A, S] of its answer rows."""

    features: Tensor
    labels: Tensor
    chances: Tensor

    def to(self, device: torch.device) -> View:
        return View(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))


class Teacher:
    """The frozen target. `layers`: the hidden states that make the features, in transformers' numbering."""

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        self.target, self.layers = target, tuple(layers)

    @torch.no_grad()
    def view(self, examples: Sequence[Example]) -> list[View]:
        """Run the target over the examples, all in one pass."""
        device = self.target.device
        tokens = pad([example.tokens for example in examples]).to(device)
        wanted = answer_rows(examples, tokens.shape[1]).to(device)
        features, logits = read_target(self.target, self.layers, tokens, wanted)
        parts = [_best(part) for part in logits.split(ROWS)]
        labels, chances = (torch.cat(column).split(wanted.sum(dim=1).tolist()) for column in zip(*parts, strict=True))
        kept = [features[row, : len(example.tokens)] for row, example in enumerate(examples)]
        return [View(*view) for view in zip(kept, labels, chances, strict=True)]


def read_target(target: Target, layers: Sequence[int], tokens: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Run the target over texts [B, T]. Returns the features [B, T, F] of layers and the logits [R, V] of the R rows
    that are `wanted` [B, T] bool; padding at the right is invisible to what stands before it."""
    # Most rows belong to prompts, and a vocabulary is wide: the others never reach the model's own output layer.
    output = target.model.get_output_embeddings()
    narrowed = output.register_forward_pre_hook(lambda _, args: (args[0][wanted][None], *args[1:]))
    try:
        with capture_features(target.model, layers) as captured:
            logits = target.model(input_ids=tokens, use_cache=False).logits[0]
    finally:
        narrowed.remove()
    return torch.cat([captured[layer] for layer in layers], dim=-1), logits


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens [R, S] by logits [R, V], and their probabilities."""
    logits = logits.float()
    best = logits.topk(min(LABELS, logits.shape[-1]), dim=-1)
    return best.indices, (best.values - logits.logsumexp(dim=-1, keepdim=True)).exp()


def make_lesson(examples: Sequence[Example], views: Sequence[View]) -> Lesson:
    """Put examples and the target's views of them into one padded batch, on the device of the views."""
    first = views[0]
    tokens = pad([example.tokens for example in examples]).to(first.features.device)
    answers = answer_rows(examples, tokens.shape[1]).to(tokens.device)
    shape = (*tokens.shape, first.labels.shape[1])
    features = first.features.new_zeros(*tokens.shape, first.features.shape[1])
    for row, view in enumerate(views):
        features[row, : len(view.features)] = view.features
    labels = torch.zeros(shape, dtype=torch.long, device=tokens.device)
    labels[answers] = torch.cat([view.labels for view in views]).long()
    chances = torch.zeros(shape, device=tokens.device)
    chances[answers] = torch.cat([view.chances for view in views]).float()
    return Lesson(tokens, answers, features, labels, chances)


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of numbers as one tensor [B, T], padded with 0 at their ends."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


def answer_rows(examples: Sequence[Example], width: int) -> Tensor:
    """[B, T] bool: the rows t whose next token, t + 1, belongs to an answer."""
    rows = torch.zeros(len(examples), width, dtype=torch.bool)
    for row, example in zip(rows, examples, strict=True):
        for begin, end in example.spans:
            row[begin - 1 : end - 1] = True
    return rows
