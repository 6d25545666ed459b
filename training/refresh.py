"""A head that follows its target: trained further on the answers of rollouts, for a bounded share of their time."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import cycle
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from decode import Answer, Target
from decode.weights.layers import cast
from heads.formats.layout import choose_dtype
from training.data import Example
from training.factory import make_objective
from training.feature_cache import BatchLoader
from training.objectives import Loss
from training.teacher import Batch, Teacher
from training.trainer import MAX_NORM, plan_batches

GAIN = "rollout/refresh_gain"
SHARE = 0.1  # of the time of generation
RATE = 3e-5  # a new head learns at 1e-3; more would undo what it learned from millions of tokens
BATCH_TOKENS = 256  # a step should be short next to a call, for time is checked after it; the target's pass takes most


class HeadRefresh:
    """Trains the head of a proposer further after every `every` calls, on the answers since the last time.

    It takes `SHARE` of the time of generation. Each refresh makes at least one step. What goes beyond the share is
    missing for later ones, which are left out until there is time again. The drafting head changes at the end of a
    refresh: an error leaves it as it was.

    It needs memory for the head's weights in float32, those at first, and AdamW's two moments. While it trains, it also
    needs gradients, and the output matrix in float32.

    Raises ValueError for a proposer without a trained head, and for a head that cannot be trained.
    """

    def __init__(self, proposer: Any, target: Target, every: int) -> None:
        self._drafter = getattr(proposer, "drafter", proposer)
        if not hasattr(self._drafter, "replace_head"):
            raise ValueError(
                "refresh trains the head of a proposer, and this one has none; leave refresh out, or give a proposer "
                'with a head: a head\'s folder, or lambda target: load_proposer("merged", target, head=FOLDER)'
            )
        self.proposer, self.target, self._every = proposer, target, every
        self._head: Any = self._drafter.copy_head(target).to(target.device, torch.float32)
        make_objective(self._head, target)  # what follows the target is not trained
        trained = {name: each for name, each in self._head.named_parameters() if each.requires_grad}
        self._first = {f"head.{name}": each.detach().clone() for name, each in trained.items()}
        self._optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.0)
        self._calls, self._seconds = 0, 0.0  # that may still be taken
        self._examples: list[Example] = []

    def follow(self, answers: Sequence[Answer], seconds: float) -> dict[str, float]:
        """Take in the answers of a call, which took so many seconds. Returns what a refresh gained, if there was one.

        The gain is the head's tau relative to that of the head as it was at first. Both are estimated on texts that it
        was not trained on yet (`estimate_tau`).
        """
        self._calls += 1
        self._seconds += SHARE * seconds
        pairs = ((each.prompt, each.tokens) for each in answers if len(each.tokens) > 1)
        for prompt, tokens in pairs:
            self._examples.append(Example((*prompt, *tokens), ((len(prompt), len(prompt) + len(tokens)),)))
        if self._calls % self._every:
            return {}
        examples, self._examples = self._examples, []
        if self._seconds <= 0 or not examples:
            return {}
        begun = perf_counter()
        try:
            return {GAIN: self._train(examples, begun + self._seconds)}
        finally:
            self._seconds -= perf_counter() - begun

    @torch.enable_grad()
    def _train(self, examples: Sequence[Example], end: float) -> float:
        """Train until the end, a time of the clock. Returns the gain."""
        head, target, gain = self._head, self.target, 0.0
        if head.output == "target":
            head.borrow(target.output_matrix, target.output_bias)
        objective = make_objective(head, target).float()
        load = BatchLoader(examples, Teacher(target, head.features))
        plan = plan_batches([len(each.tokens) for each in examples], BATCH_TOKENS, self._calls, 0)
        devices = [target.device] if target.device.type != "cpu" else []
        with torch.random.fork_rng(devices), target.backend.running():  # the trainer's own random numbers stay
            for batch in map(load, cycle(plan)):
                gain = gain or self._find_gain(objective, batch)
                self._step(objective, batch)
                if perf_counter() >= end:
                    break
        self._drafter.replace_head(copy_in(head, self._drafter.dtype), target)
        self._optimizer.zero_grad()
        if head.output == "target":
            head.borrowed = head.borrowed_bias = None
        return gain

    @torch.no_grad()
    def _find_gain(self, objective: nn.Module, batch: Batch) -> float:
        """The tau of the head relative to that of the head as it was at first."""
        devices = [self.target.device] if self.target.device.type != "cpu" else []
        taus = []
        for weights in ({}, self._first):
            with torch.random.fork_rng(devices):  # the same anchors
                taus.append(estimate_tau(functional_call(objective, weights, (batch,))))
        return taus[0] / taus[1]

    def _step(self, objective: nn.Module, batch: Batch) -> None:
        """A step of the optimizer, unless the gradients are NaN or infinite: the policy's training should go on."""
        self._optimizer.zero_grad()
        (objective(batch).total / batch.answers.sum()).backward()
        weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        if nn.utils.clip_grad_norm_(weights, MAX_NORM).isfinite():
            self._optimizer.step()


def copy_in(head: Any, dtype: torch.dtype) -> Any:
    """A copy of a head in a dtype, but for what heads have in float32 (`choose_dtype`); it shares buffers in it."""
    copied = cast(deepcopy(head, {id(each): each for each in head.buffers()}), dtype)
    for name, tensor in head.state_dict().items():
        if choose_dtype(head, name, dtype) != dtype:  # it is float32
            module, _, last = name.rpartition(".")
            getattr(copied.get_submodule(module), last).data = tensor.clone()
    return copied


def estimate_tau(loss: Loss) -> float:
    """The tau of chains of a head's most likely tokens, from how often these are the target's at each depth."""
    right: Tensor = loss.agreed / loss.anchors.clamp(min=1)
    return 1 + float(right.cumprod(0).sum())
