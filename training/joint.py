"""Medusa-2: a head and adapters of its target learn together, so that the target becomes easier to guess.

After Cai et al., "Medusa" (2024), 2.2.2; what holds the target to its own law is self-distillation, 2.3.2. It is the
second of two stages: a head that knows nothing yet would only disturb the target.

Shapes: A answer rows of all texts, S labels, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from decode import Target
from training.data import Example
from training.lora import Adapters
from training.objective import HeadObjective, Loss
from training.teacher import Lesson, Teacher, View, read_target

# The head's share of the loss, constant as in the authors' recipe for Vicuna. A ramp, as in theirs for Zephyr, would
# spare the target from heads that are yet untrained; here the first stage does.
HEADS_WEIGHT = 0.2
ADAPTERS_RATE = 1 / 4  # of the head's learning rate, in all of the authors' recipes
LEAST = 1e-6  # float32 cannot tell the rest of a law from nothing below that


class JointObjective(nn.Module):
    """KL(untouched target || adapted target) on answers, plus `HEADS_WEIGHT` times the head's loss on the adapted
    target's features. A lesson's labels are the untouched target's; its features are not used.

    The target itself is no part of the module: it stays in evaluation mode, and only head and adapters are trained.
    """

    rates: ClassVar[dict[str, float]] = {"adapters": ADAPTERS_RATE}

    def __init__(self, target: Target, adapters: Adapters, heads: HeadObjective) -> None:
        super().__init__()
        self.target, self.adapters, self.heads = target, adapters, heads

    def forward(self, lesson: Lesson) -> Loss:
        answers = lesson.answers
        features, logits = read_target(self.target, self.heads.head.features, lesson.tokens, answers)
        loss = self.heads(replace(lesson, features=features))
        drift = divergence(logits, lesson.labels[answers], lesson.chances[answers])
        return replace(loss, total=drift + HEADS_WEIGHT * loss.total)


class UntouchedTeacher(Teacher):
    """The target as it was before it got adapters."""

    def __init__(self, target: Target, layers: Sequence[int], adapters: Adapters) -> None:
        super().__init__(target, layers)
        self.adapters = adapters

    def view(self, examples: Sequence[Example]) -> list[View]:
        with self.adapters.off():
            return super().view(examples)


def divergence(logits: Tensor, labels: Tensor, chances: Tensor) -> Tensor:
    """The sum over rows of KL(p || softmax(logits)), of whose p only the likeliest tokens are known.

    logits [A, V]; labels and chances [A, S]. All other tokens count as one, which makes it a lower bound that is zero,
    with no gradient, where the laws agree. Cross-entropy with the labels alone would push the others' chance to zero.
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logs = exact.gather(1, labels) - exact.logsumexp(dim=1, keepdim=True)  # [A, S]
    p = chances.to(exact.dtype)
    rest, own_rest = ((1 - law.sum(dim=1)).clamp_min(LEAST) for law in (p, logs.exp()))  # [A]
    return (torch.xlogy(p, p) - p * logs).sum() + (rest * (rest.log() - own_rest.log())).sum()


def save_adapted(target: Target, adapters: Adapters, folder: Path) -> None:
    """Write the adapted target as an ordinary Hugging Face folder, tokenizer included, in the place of an older one.

    It is written aside and renamed, so that the folder holds a whole model or, between two renames, none.
    """
    aside, older = (folder.with_name(f".{folder.name}.{what}") for what in ("new", "old"))
    shutil.rmtree(aside, ignore_errors=True)
    try:
        target.model.save_pretrained(aside, state_dict=adapters.merge(target.model.state_dict()))
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(older, ignore_errors=True)
    if folder.exists():
        folder.rename(older)
    aside.rename(folder)
    shutil.rmtree(older, ignore_errors=True)
