"""The compared methods: the project's loop with a proposer, and Hugging Face's `generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from decode import Proposer, Sampling, Target, generate
from decode.stats import PARTS

# The arguments of each peer's `generate`; "assistant_model" is filled in when the model is loaded.
PEERS: dict[str, dict[str, Any]] = {
    "hf": {},
    "hf-prompt-lookup": {"prompt_lookup_num_tokens": 10},
    "hf-assistant": {"assistant_model": None},
}


@dataclass(frozen=True)
class Measured:
    """One batch of answers: token ids (end token included), forward passes of the target, and wall time in seconds.

    Only the project's loop knows `texts`, `nodes` and `parts`, the seconds of each part of the loop. `parts` is for
    CPUs only: a GPU's work is queued in one part and waited for in another.
    """

    answers: list[list[int]]
    steps: list[int]
    seconds: float
    texts: list[str] | None = None
    nodes: list[int] | None = None
    parts: dict[str, float] | None = None


# Takes prompts as token ids, a seed and `max_new_tokens`.
Ask: TypeAlias = Callable[[Sequence[list[int]], int, int], Measured]


class Method(Protocol):
    """One of the compared methods."""

    def open(self) -> Ask:
        """Begin a conversation, with nothing learned from others; the result answers its turns."""
        ...


class Loop:
    """The project's loop, with a new proposer for every conversation."""

    def __init__(self, target: Target, make: Callable[[], Proposer], temperature: float, nodes: int) -> None:
        self.target, self.make, self.temperature, self.nodes = target, make, temperature, nodes

    def open(self) -> Ask:
        return partial(self._ask, self.make())

    def _ask(self, proposer: Proposer, prompts: Sequence[list[int]], seed: int, room: int) -> Measured:
        settings = {"sampling": Sampling(self.temperature, seed=seed), "max_new_tokens": room, "nodes": self.nodes}
        work = partial(generate, self.target, prompts, proposer, **settings)
        answers, seconds = clock(work, self.target.device)
        longest = max((answer.stats.seconds for answer in answers), key=lambda spent: spent.total)  # of the whole batch
        return Measured(
            [answer.tokens for answer in answers],
            [answer.stats.steps for answer in answers],
            seconds,
            [answer.text for answer in answers],
            [answer.stats.nodes for answer in answers],
            {part: getattr(longest, part) for part in PARTS} if self.target.device.type == "cpu" else None,
        )


class Peer:
    """Hugging Face's `generate` on a stock model."""

    def __init__(self, model: PreTrainedModel, options: Mapping[str, Any]) -> None:
        self.model, self.options = model, dict(options)

    def open(self) -> Ask:
        return self._ask

    def _ask(self, prompts: Sequence[list[int]], seed: int, room: int) -> Measured:
        (prompt,) = prompts
        steps = 0

        def count(module: nn.Module, inputs: Any) -> None:
            nonlocal steps
            steps += module is self.model  # a draft cut from the model shares its hooks

        def work() -> list[int]:
            ids = torch.tensor([prompt], device=self.model.device)
            output = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=room, **self.options)
            return [int(token) for token in output[0, len(prompt) :].tolist()]

        torch.manual_seed(seed)
        hook = self.model.register_forward_pre_hook(count)
        try:
            answer, seconds = clock(work, self.model.device)
        finally:
            hook.remove()
        return Measured([answer], [steps], seconds)


def clock(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of `work`, and its seconds, GPU work included."""
    _synchronize(device)
    begun = perf_counter()
    result = work()
    _synchronize(device)
    return result, perf_counter() - begun


def top_gap(target: Target, tokens: list[int]) -> float:
    """The gap between the target's two highest logits for the next token; near 0, rounding decides."""
    logits, _ = target.open(1).extend([tokens])
    first, second = logits[0].double().topk(2).values.tolist()
    return first - second


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
