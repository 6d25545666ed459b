"""The compared methods: the project's loop with a proposer, and Hugging Face's `generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

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


Ask: TypeAlias = Callable[[Sequence[list[int]], int, int], Measured]  # takes token ids, seed and `max_new_tokens`
Method: TypeAlias = Callable[[], Ask]  # begins a conversation with nothing learned from others


def ask_loop(
    target: Target,
    proposer: Proposer,
    temperature: float,
    nodes: int,
    prompts: Sequence[list[int]],
    seed: int,
    max_new_tokens: int,
) -> Measured:
    """Answer the prompts as one batch with the project's loop."""
    settings = {"sampling": Sampling(temperature, seed=seed), "max_new_tokens": max_new_tokens, "nodes": nodes}
    answers, seconds = clock(lambda: generate(target, prompts, proposer, **settings), target.device)
    longest = max((answer.stats.seconds for answer in answers), key=lambda spent: spent.total)  # of the whole batch
    return Measured(
        [answer.tokens for answer in answers],
        [answer.stats.steps for answer in answers],
        seconds,
        [answer.text for answer in answers],
        [answer.stats.nodes for answer in answers],
        {part: getattr(longest, part) for part in PARTS} if target.device.type == "cpu" else None,
    )


def ask_peer(
    model: PreTrainedModel, options: Mapping[str, Any], prompts: Sequence[list[int]], seed: int, max_new_tokens: int
) -> Measured:
    """Answer one prompt with transformers' `generate` and count the model's forward passes."""
    ids = torch.tensor(prompts, device=model.device)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_new_tokens, **options}
    steps = 0

    def count(module: nn.Module, inputs: Any) -> None:
        nonlocal steps
        steps += module is model  # a draft cut from the model shares its hooks

    torch.manual_seed(seed)
    hook = model.register_forward_pre_hook(count)
    try:
        output, seconds = clock(lambda: model.generate(ids, **settings)[0, ids.shape[1] :].tolist(), model.device)
    finally:
        hook.remove()
    return Measured([output], [steps], seconds)


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
