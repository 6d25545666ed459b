"""The compared methods: the project's loop with a proposer, and Hugging Face's `generate`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from decode import Proposer, Sampling, Target, generate
from decode.models.loading import first_layers
from decode.stats import PARTS
from proposers import HEAD_PROPOSERS, AnswerStore, DraftProposer, HeadProposer, MergedProposer
from proposers.load import DRAFT_LAYERS
from scripts.benchmark.options import PEERS, BenchOptions, keeps_answers, parse_method
from scripts.shared.options import find_head, load_model_only, make_proposer

NODES = 64  # largest draft tree


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


def make_methods(options: BenchOptions, target: Target) -> dict[str, Method]:
    """The methods of the options, with their draft models, heads and peers loaded."""
    loops = {name: _make_loop(name, options, target) for name in options.methods}
    return {**loops, **(_make_peers(options, target) if options.peers else {})}


def _make_loop(name: str, options: BenchOptions, target: Target) -> Method:
    """The project's loop. Each conversation has a proposer that has learned nothing yet and shares the models."""
    drafting = parse_method(name)
    if drafting.proposer == "draft":
        drafting = replace(drafting, draft_model=options.draft_model)
    kind = drafting.head or drafting.proposer
    if kind in HEAD_PROPOSERS:
        folder = find_head(kind, options.heads.get(kind), options.model.model)
        drafting = replace(drafting, head=str(folder))
    proposer = make_proposer(drafting, target, options.model)
    nodes = drafting.nodes or NODES
    if keeps_answers(name):
        proposer = MergedProposer(head=proposer.head, store=AnswerStore(), nodes=proposer.nodes)
        return _KeepAnswers(lambda proposer: partial(ask_loop, target, proposer, options.temperature, nodes), proposer)
    renew: Callable[[], Proposer] = type(proposer)
    if isinstance(proposer, HeadProposer | MergedProposer):
        renew = proposer.renew
    elif isinstance(proposer, DraftProposer):
        renew = partial(DraftProposer, proposer.draft)
    return lambda: partial(ask_loop, target, renew(), options.temperature, nodes)


class _KeepAnswers:
    """A method whose conversations share a proposer and its store of answers, all but the first, which warms up."""

    def __init__(self, bind: Callable[[Proposer], Ask], proposer: MergedProposer) -> None:
        self._bind, self._proposer, self._is_warm = bind, proposer, False

    def __call__(self) -> Ask:
        if self._is_warm:
            return self._bind(self._proposer)
        self._is_warm = True
        return self._bind(self._proposer.renew())


def _make_peers(options: BenchOptions, target: Target) -> dict[str, Method]:
    """Hugging Face's `generate` in each way, all on one unaccelerated copy of the model.

    Of the model's generation config only the end tokens are kept: penalties or top-k would give peers another
    distribution than the project's loop.
    """
    model, tokenizer = load_model_only(options.model, "off")
    stops = sorted(target.stop_ids)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(stops), 0)
    sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0} if options.temperature else {}
    model.generation_config = GenerationConfig(eos_token_id=stops or None, pad_token_id=pad, **sampling)
    peers = {name: dict(PEERS[name]) for name in options.peers}
    if "hf-assistant" in peers:
        if options.draft_model is not None:
            assistant, _ = load_model_only(replace(options.model, model=options.draft_model), "off")
        else:
            assistant = first_layers(model, DRAFT_LAYERS)
            assistant.generation_config = copy.deepcopy(model.generation_config)  # transformers writes to it
        peers["hf-assistant"]["assistant_model"] = assistant
    # A conversation with a peer has no state, so opening one only binds the arguments.
    return {name: partial(partial, ask_peer, model, settings) for name, settings in peers.items()}


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
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    synchronize()
    begun = perf_counter()
    result = work()
    synchronize()
    return result, perf_counter() - begun


def measure_gap(target: Target, tokens: list[int]) -> float:
    """The gap between the target's two highest logits for the next token; near 0, rounding decides."""
    logits, _ = target.open(1).extend([tokens])
    first, second = logits[0].double().topk(2).values.tolist()
    return first - second
