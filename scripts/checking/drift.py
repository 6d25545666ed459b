"""How far an adapter has moved its model: the perplexity of the original's own answers, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import NamedTuple

import torch

from decode import Target, Tree, stream
from decode.models.adapters import find_base
from decode.session import Session
from draftless_commands.checking.serving import PROMPTS
from draftless_commands.shared.options import ModelOptions, load_target
from draftless_commands.shared.results import INTERVAL, resample
from draftless_commands.shared.terminal import list_answers
from draftless_commands.shared.worth import count
from proposers import NGramProposer


class Scored(NamedTuple):
    """An answer, and its negative log-likelihood under the model that gave it, summed over its tokens."""

    prompt: list[int]
    tokens: list[int]
    loss: float


@dataclass(frozen=True)
class Drift:
    """Perplexities of the original's greedy answers, and their ratio with a 95 % interval, bootstrapped over prompts.

    A perplexity is exp of the mean negative log-likelihood of an answer's token.
    """

    original: float
    adapted: float
    ratio: float
    interval: tuple[float, float]
    tokens: int
    prompts: int

    def describe(self) -> str:
        low, high = self.interval
        basis = f"{count(self.tokens, 'token')} of {count(self.prompts, 'prompt')}, greedy"
        return (
            f"perplexity of the original model's answers: {self.original:.2f}, with the adapter {self.adapted:.2f}: "
            f"{self.ratio:.2f}x [{low:.2f}, {high:.2f}] ({basis}, 95 % interval)"
        )


def answer_without_adapter(options: ModelOptions, new_tokens: int) -> list[Scored]:
    """The answers of an adapter's base model to `PROMPTS`, at most so many tokens each. options.model: the adapter.

    Call it before the adapted model is loaded: then there need not be memory for both. Raises ValueError if the base
    model cannot be loaded or gives no numbers.
    """
    original = load_target(replace(options, model=find_base(Path(str(options.model)))))
    answers = list_answers(stream(original, PROMPTS, NGramProposer(), max_new_tokens=new_tokens, text=False))
    return [Scored(each.prompt, each.tokens, score(original, each.prompt, each.tokens)) for each in answers]


@torch.no_grad()
def score(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The negative log-likelihood of an answer's tokens, summed."""
    text, begin = [*prompt, *answer], len(prompt)
    verdict = Session(target, 1).verify(Tree.chain([text[:-1]]), only=range(begin - 1, len(text) - 1))
    logits, tokens = verdict.logits[0].float(), torch.tensor(answer, device=verdict.logits.device)
    return float(torch.nn.functional.cross_entropy(logits, tokens, reduction="sum"))


def measure_drift(answers: Sequence[Scored], adapted: Target) -> Drift:
    """The drift of a target with an adapter, from what `answer_without_adapter` found."""
    losses = [score(adapted, each.prompt, each.tokens) for each in answers]
    tokens = sum(len(each.tokens) for each in answers)
    before, after = exp(sum(each.loss for each in answers) / tokens), exp(sum(losses) / tokens)
    grown = [(loss - each.loss, len(each.tokens)) for loss, each in zip(losses, answers, strict=True)]
    low, high = resample(grown).quantile(INTERVAL).exp().tolist()
    return Drift(before, after, after / before, (low, high), tokens, len(answers))
