"""Measuring a head on text that it was not trained on: what its guesses were, beside what the target said.

Shapes: P positions, K heads, R ranks, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode import Target
from proposers.calibration import Calibration, log_odds
from proposers.head_proposer import HeadProposer
from proposers.tree_search import RANKS, rank_tokens

PRIOR = 3.0  # how strongly a head's own word is believed before it was measured, in outcomes
TOGETHER = 64  # positions that are tried together: an EAGLE head needs what it looks back on for each of them
START = (0.0, 1.0, 0.0)  # the head's own word


@dataclass(frozen=True)
class Trials:
    """What the heads said at many positions, along the text that followed there."""

    sure: Tensor  # [P, K, R] log-probabilities, the likeliest guess first
    right: Tensor  # [P, K, R] bool: the guess was the next token
    known: Tensor  # [P, K] bool: the text goes on so far

    @classmethod
    def join(cls, parts: Iterable[Trials]) -> Trials:
        """All of them together. Raises ValueError where there are none."""
        columns = list(zip(*((part.sure, part.right, part.known) for part in parts), strict=True))
        if not columns or not sum(len(part) for part in columns[0]):
            raise ValueError("there is no position to measure at: every answer ended with its first token")
        return cls(*(torch.cat(column) for column in columns))

    @property
    def reached(self) -> Tensor:
        """Where a head's guess counts, [P, K] bool: those before it had the true tokens among their ranks."""
        found = self.right.any(dim=2)
        before = torch.cat([torch.ones_like(found[:, :1]), found[:, :-1]], dim=1)
        return self.known & before.cumprod(dim=1).bool()


@torch.no_grad()
def try_head(target: Target, proposer: HeadProposer, prompt: Sequence[int], answer: Sequence[int]) -> Trials:
    """What the heads say at each position of an answer that the target gave.

    Each is asked along the true text, on the target's own features: there a tree is that has grown right so far.
    """
    tokens = [*prompt, *answer]
    _, features = target.open(1, proposer.layers).extend([tokens])
    assert features is not None
    text = torch.tensor(tokens, device=target.device)
    first, last = len(prompt) - 1, len(tokens) - 2  # the last committed token; what follows it is the root
    parts = [(begin, min(begin + TOGETHER, last)) for begin in range(first, last, TOGETHER)]
    return Trials.join(_try_part(target, proposer, features, text, *part) for part in parts)


def _try_part(target: Target, proposer: HeadProposer, features: Tensor, text: Tensor, begin: int, end: int) -> Trials:
    guesses = proposer.rehearse(features, text, begin, end, target)
    padded = torch.cat([text, text.new_full((proposer.depth,), -1)])
    sure, right, known = [], [], []
    for level in range(proposer.depth):
        truth = padded[begin + 2 + level : end + 2 + level, None]  # [P, 1]
        drafted, chances = rank_tokens(guesses.logits(level), RANKS)
        sure.append(chances[:, 0])
        right.append(guesses.tokens(drafted[:, 0]) == truth)
        known.append(truth[:, 0] >= 0)
        if level + 1 < proposer.depth:
            guesses.follow(torch.zeros_like(truth), truth.clamp(min=0))
    return Trials(*(torch.stack(parts, dim=1).cpu() for parts in (sure, right, known)))


def calibrate(trials: Trials) -> Calibration:
    """How often each rank was right, and the most likely confidences (`Calibration` says of what)."""
    reached = trials.reached
    counts = reached.sum(dim=0)  # [K]
    right = trials.right & reached[:, :, None]
    acceptance = right.sum(dim=0) / counts[:, None].clamp(min=1)
    before = torch.zeros(len(reached), dtype=torch.float64)  # the score of the true path so far
    confidence = []
    for level in range(reached.shape[1]):
        here = reached[:, level]
        odds = log_odds(trials.sure[here, level].double())  # [P, R]
        inputs = torch.stack([torch.ones_like(odds), odds, before[here, None].expand_as(odds)], dim=2)
        weights = fit_logistic(inputs.flatten(0, 1), right[here, level].flatten())
        confidence.append(tuple(weights.tolist()))
        scores = torch.nn.functional.logsigmoid(inputs @ weights)
        before[here] += scores.where(right[here, level], 0).sum(dim=1)
    return Calibration(tuple(map(tuple, acceptance.tolist())), tuple(confidence), tuple(counts.tolist()))


def fit_logistic(inputs: Tensor, outcomes: Tensor) -> Tensor:
    """The weights [3] with which sigmoid(inputs @ weights) makes the outcomes likeliest; inputs [N, 3].

    Maximum likelihood, held by a weak prior to the head's own word: few outcomes must not make for certainty.
    """
    start = torch.tensor(START, dtype=inputs.dtype)
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        misfit = torch.nn.functional.binary_cross_entropy_with_logits(inputs @ weights, outcomes.to(inputs.dtype))
        value = misfit + PRIOR / len(inputs) * ((weights - start) ** 2).sum()
        value.backward()
        return value

    if len(inputs):
        with torch.enable_grad():
            optimizer.step(loss)
    return weights.detach()
