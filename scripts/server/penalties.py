"""Penalties and biases of a request as logits processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor


class CountPenalty(LogitsProcessor):
    """OpenAI's penalties: a logit falls by `presence` if the answer has its token, and by `frequency` each time.

    prompt: the tokens of the prompt, which are not counted.
    """

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[0, self.prompt :]
        counts = torch.bincount(answer, minlength=scores.shape[-1]).to(scores.dtype)
        return scores - self.presence * (counts > 0) - self.frequency * counts


def make_processors(fields: Any, prompt: int, vocabulary: int) -> Callable[[int], list[LogitsProcessor]] | tuple[()]:
    """A function that makes a request's processors; () if it needs none. prompt: its number of tokens.

    Raises ValueError for a bias of what is no token id.
    """
    made: list[LogitsProcessor] = []
    if fields.repetition_penalty not in (None, 1.0):
        made.append(RepetitionPenaltyLogitsProcessor(fields.repetition_penalty))
    if fields.logit_bias:
        for token in fields.logit_bias:
            if not token.isdecimal() or len(token) > 10 or int(token) >= vocabulary:
                raise ValueError(f"logit_bias has {token!r}; its keys are token ids from 0 to {vocabulary - 1}")
        biases = {(int(token),): float(bias) for token, bias in fields.logit_bias.items()}
        made.append(SequenceBiasLogitsProcessor(biases))
    if fields.presence_penalty or fields.frequency_penalty:
        made.append(CountPenalty(prompt, fields.presence_penalty or 0.0, fields.frequency_penalty or 0.0))
    return (lambda request_id: made) if made else ()
