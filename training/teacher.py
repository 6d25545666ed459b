"""Training targets: the frozen model's features and next-token probabilities, for examples and padded batches.

Shapes: B rows, T tokens, F feature width, A answer positions, S labels (the most likely tokens), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode import Target
from decode.devices.backend import top_tokens
from decode.models.stock_model import capture_features
from training.data import Example

TOP_K_ROWS = 256  # positions whose logits are reduced to labels at a time
LABELS = 48  # most likely tokens kept per position; on chat answers they hold over 0.99 of the probability


class Targets(NamedTuple):
    """The training targets of one example. Labels are only kept for its A answer positions."""

    features: Tensor  # [T, F]
    labels: Tensor  # [A, S]
    probabilities: Tensor  # [A, S]


class Batch(NamedTuple):
    """Examples and their training targets, padded at the end of each row.

    The labels at t are the model's most likely next tokens after token t, with their probabilities at temperature 1.
    `answers` marks the positions t whose next token, t + 1, belongs to an answer; other positions have no labels.
    """

    tokens: Tensor  # [B, T] long
    answers: Tensor  # [B, T] bool
    features: Tensor  # [B, T, F]
    labels: Tensor  # [B, T, S] long
    probabilities: Tensor  # [B, T, S] float32


class Teacher:
    """Computes training targets with the frozen model. `layers`: the hidden states that form the features, as
    transformers numbers them. `context`: entered for each pass, for example to leave out adapters."""

    def __init__(
        self, target: Target, layers: Sequence[int], context: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.target, self.layers, self.context = target, tuple(layers), context

    @torch.no_grad()
    def compute(self, examples: Sequence[Example]) -> list[Targets]:
        """The targets of the examples, from one forward pass."""
        tokens, answers = (part.to(self.target.device) for part in pad_examples(examples))
        with self.context(), self.target.backend.reading_texts():
            features, logits = run_target(self.target, self.layers, tokens, answers)
        best = (top_tokens(part, LABELS) for part in logits.split(TOP_K_ROWS))
        labels, log_p = (torch.cat(parts).split(answers.sum(dim=1).tolist()) for parts in zip(*best, strict=True))
        kept = [features[row, : len(example.tokens)] for row, example in enumerate(examples)]
        return [Targets(states, ids, p.exp()) for states, ids, p in zip(kept, labels, log_p, strict=True)]


def run_target(target: Target, layers: Sequence[int], tokens: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """The features [B, T, F] of texts [B, T], padded at the right, and the logits [A, V] at their answer positions."""
    # Most positions belong to prompts, and a vocabulary is wide: they skip the output layer.
    output = target.model.get_output_embeddings()
    hook = output.register_forward_pre_hook(lambda _, args: (args[0][answers][None], *args[1:]))
    try:
        with capture_features(target.model, layers) as captured:
            logits = target.model(input_ids=tokens, use_cache=False).logits[0]  # of all texts
    finally:
        hook.remove()
    nothing = torch.empty(*tokens.shape, 0, dtype=target.dtype, device=tokens.device)
    return torch.cat([nothing, *(captured[layer].to(tokens.device) for layer in layers)], dim=-1), logits


def collate(examples: Sequence[Example], targets: Sequence[Targets]) -> Batch:
    """Examples and their targets as one padded batch, on the device of the targets."""
    features = pad_sequence([one.features for one in targets], batch_first=True)
    tokens, answers = (part.to(features.device) for part in pad_examples(examples))
    labels = torch.zeros(*tokens.shape, targets[0].labels.shape[1], dtype=torch.long, device=tokens.device)
    labels[answers] = torch.cat([one.labels for one in targets]).long()
    probabilities = torch.zeros(labels.shape, device=tokens.device)
    probabilities[answers] = torch.cat([one.probabilities for one in targets]).float()
    return Batch(tokens, answers, features, labels, probabilities)


def pad_examples(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """The tokens [B, T], padded with 0 at the right, and [B, T] bool: the positions t whose next token, t + 1, belongs
    to an answer."""
    tokens = pad_sequence([torch.tensor(example.tokens) for example in examples], batch_first=True)
    answers = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, example in zip(answers, examples, strict=True):
        for begin, end in example.spans:
            row[begin - 1 : end - 1] = True
    return tokens, answers
