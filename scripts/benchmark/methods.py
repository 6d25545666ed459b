"""The compared methods: the project's loop with a proposer, and Hugging Face's `generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise, repeat
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from decode import Proposer, Sampling, Target, stream
from decode.stats import PARTS
from proposers import (
    AnswerStore,
    DraftProposer,
    HeadProposer,
    MergedProposer,
    NGramProposer,
)
from scripts.benchmark.method_names import FIXED, NamedMethod, parse_method
from scripts.benchmark.options import PEERS, BenchOptions
from scripts.shared.options import load_model_only, make_proposer

NODES = 64  # largest draft tree


@dataclass(frozen=True)
class Measured:
    """One batch of answers: token ids (end token included), and wall time in seconds.

    added: how many tokens each forward pass of the target added to each answer. Only the project's loop knows `texts`,
    `nodes`, `parts`, the seconds of each part of the loop, and `accepted`, the accepted draft tokens by source, if the
    proposer counts them. `parts` is for CPUs only: a GPU's work is queued in one part and waited for in another.
    """

    answers: list[list[int]]
    added: list[list[int]]
    seconds: float
    texts: list[str] | None = None
    nodes: list[int] | None = None
    parts: dict[str, float] | None = None
    accepted: dict[str, int] | None = None


Ask: TypeAlias = Callable[[Sequence[list[int]], int, int], Measured]  # takes token ids, seed and `max_new_tokens`
Method: TypeAlias = Callable[[], Ask]  # begins a conversation with nothing learned from others


def make_methods(options: BenchOptions, target: Target) -> dict[str, Method]:
    """The methods of the options, with their draft models, heads and peers loaded."""
    loops = {name: _make_loop(name, options, target) for name in options.methods}
    return {**loops, **(_make_peers(options, target) if options.peers else {})}


def _make_loop(name: str, options: BenchOptions, target: Target) -> Method:
    """The project's loop. Each conversation has a proposer that has learned nothing yet and shares the models."""
    method = parse_method(name)

    def bind(proposer: Proposer) -> Ask:
        return partial(ask_loop, target, proposer, options.temperature, method.nodes or NODES)

    if method.kind in FIXED and method.nodes is not None:
        make = partial(_make_fixed, method.kind, method.nodes)
        return lambda: bind(make())
    proposer = _load_proposer(method, options, target)
    renew: Callable[[], Proposer] = type(proposer)
    if isinstance(proposer, MergedProposer):
        sources = [source for source in proposer.sources if source.name != method.without]
        proposer = MergedProposer(sources, proposer.head, nodes=proposer.nodes)
        if method.keeps_answers:
            return _keep_answers(bind, proposer)
    if isinstance(proposer, HeadProposer | MergedProposer):
        renew = proposer.renew
    elif isinstance(proposer, DraftProposer):
        renew = partial(DraftProposer, proposer.draft)
    return lambda: bind(renew())


def _load_proposer(method: NamedMethod, options: BenchOptions, target: Target) -> Proposer:
    """The method's proposer, with its draft model or head."""
    drafting, kind = method.options, method.options.head or method.kind
    if kind == "draft":
        drafting = replace(drafting, draft_model=options.draft_model)
    elif kind in options.heads:
        drafting = replace(drafting, head=options.heads[kind])
    return make_proposer(drafting, target, options.model)


def _make_fixed(kind: str, nodes: int) -> Proposer:
    """A proposer of `FIXED` whose trees have so many nodes, root included."""
    if kind == "ngram":
        return NGramProposer(length=nodes - 1)
    return NGramProposer(max_size=2, length=nodes - 1, first=True)


def _keep_answers(bind: Callable[[Proposer], Ask], proposer: MergedProposer) -> Method:
    """A method whose conversations share a store of answers alone. The first one, which warms up, has no store."""
    keeping = MergedProposer(proposer.renew().sources, proposer.head, store=AnswerStore(), nodes=proposer.nodes)
    openings = chain([proposer], repeat(keeping))

    def open_conversation() -> Ask:
        opened = next(openings).renew()
        ask = bind(opened)

        def ask_and_keep(prompts: Sequence[list[int]], seed: int, max_new_tokens: int) -> Measured:
            measured = ask(prompts, seed, max_new_tokens)
            opened.keep_answers()
            return measured

        return ask_and_keep

    return open_conversation


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
        assistant, _ = load_model_only(replace(options.model, model=options.draft_model), "off")
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
    before = count_accepted(proposer)
    chunks, seconds = clock(lambda: [*stream(target, prompts, proposer, text=False, **settings)], target.device)
    answers = {chunk.request_id: chunk.answer for chunk in chunks if chunk.answer is not None}
    ordered = [answers[row] for row in range(len(prompts))]
    if failed := [answer.error for answer in ordered if answer.error is not None]:
        raise ValueError(failed[0])
    longest = max((answer.stats.seconds for answer in ordered), key=lambda spent: spent.total)  # of the whole batch
    return Measured(
        [answer.tokens for answer in ordered],
        [[len(chunk.tokens) for chunk in chunks if chunk.request_id == row] for row in range(len(prompts))],
        seconds,
        [answer.text for answer in ordered],
        [answer.stats.nodes for answer in ordered],
        {part: getattr(longest, part) for part in PARTS} if target.device.type == "cpu" else None,
        {name: count - before[name] for name, count in count_accepted(proposer).items()} or None,
    )


def count_accepted(proposer: Proposer) -> dict[str, int]:
    """The accepted draft tokens by source so far; empty for proposers without sources."""
    return dict(proposer.accepted_by_source) if isinstance(proposer, MergedProposer) else {}


def ask_peer(
    model: PreTrainedModel, options: Mapping[str, Any], prompts: Sequence[list[int]], seed: int, max_new_tokens: int
) -> Measured:
    """Answer one prompt with transformers' `generate`."""
    ids = torch.tensor(prompts, device=model.device)
    lengths = [ids.shape[1]]

    def note_length(sequences: Tensor, scores: Any) -> Tensor:
        """A stopping criterion, asked after each forward pass of the model, which never stops."""
        lengths.append(sequences.shape[1])
        return torch.zeros_like(sequences[:, 0], dtype=torch.bool)

    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_new_tokens, **options}
    torch.manual_seed(seed)
    criteria = StoppingCriteriaList([note_length])
    output, seconds = clock(lambda: model.generate(ids, stopping_criteria=criteria, **settings), model.device)
    added = [after - before for before, after in pairwise(lengths)]
    return Measured([output[0, ids.shape[1] :].tolist()], [added], seconds)


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
