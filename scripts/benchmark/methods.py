"""The compared methods: the project's loop with any proposer, and Hugging Face's `generate`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from decode import Proposer, Sampling, Target, stream
from decode.stats import PARTS
from proposers import AnswerStore, MergedProposer, load_proposer
from proposers.load import check_options
from scripts.shared.options import ModelOptions, load_model_only, load_target

NODES = 64  # largest draft tree
PEERS: dict[str, dict[str, Any]] = {  # transformers' own methods, and their arguments of `generate`
    "hf": {},
    "hf-prompt-lookup": {"prompt_lookup_num_tokens": 10},
    "hf-assistant": {},
}
METHODS_HELP = f"""comma-separated. A proposer as for --proposer, with its options after a colon:
merged:nodes=16,head=hydra; a class of your own: FILE.py:CLASS; transformers' {", ".join(PEERS)}, with arguments of
generate as options. warm=true keeps answers between questions. none is always added"""
SPEC = re.compile(r"(?P<name>.+?)(?::(?P<options>\w+=.*))?")
OPTION = re.compile(r"\w+=")


@dataclass(frozen=True)
class NamedMethod:
    """A method as it is given on the command line. text: the row's name."""

    text: str
    name: str
    options: Mapping[str, Any]
    warm: bool

    @property
    def is_peer(self) -> bool:
        return self.name in PEERS

    def check(self, model: ModelOptions) -> None:
        """Raise ValueError, before anything is loaded, for what the method does not have."""
        if not self.is_peer:
            check_options(self.name, self.options, pretrained=model.model is None)
            if self.warm and self.name not in ("merged", "auto"):
                raise ValueError(f"{self.text}: warm is for merged and auto, which draft from earlier answers")
        elif self.warm or (self.name == "hf-assistant") != ("draft_model" in self.options):
            raise ValueError(f"{self.text}: draft_model=MODEL is for hf-assistant, which needs it; no peer is warm")


def parse_methods(text: str) -> list[NamedMethod]:
    """The methods of a list such as "none,merged:nodes=16,head=hydra,my.py:Mine"; plain decoding is the first one.

    A part that begins with NAME= is an option of the method before it. Raises ValueError for other forms.
    """
    specs: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if OPTION.match(part) and not specs:
            raise ValueError(f"--methods begins with the option {part!r}; name a method first")
        if OPTION.match(part):
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    return [_parse_method(spec) for spec in dict.fromkeys(("none", *specs))]


def _parse_method(text: str) -> NamedMethod:
    found = SPEC.fullmatch(text)
    assert found is not None
    pairs = (pair.partition("=") for pair in (found["options"] or "").split(",") if pair)
    options = {name: _read_value(value) for name, _, value in pairs}
    return NamedMethod(text, found["name"], options, bool(options.pop("warm", False)))


def _read_value(text: str) -> Any:
    """A whole number, true or false, or else text."""
    return int(text) if text.isdecimal() else {"true": True, "false": False}.get(text, text)


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
# Begins a conversation with a proposer that has learned nothing. True: it is the warm-up, whose answers are not kept.
Method: TypeAlias = Callable[[bool], Ask]


def make_methods(
    named: Sequence[NamedMethod], target: Target, model: ModelOptions, temperature: float
) -> dict[str, Method]:
    """The methods by their texts, with their draft models, heads and peers loaded."""
    loops = {each.text: _make_loop(each, target, model, temperature) for each in named if not each.is_peer}
    peers = [each for each in named if each.is_peer]
    made = loops | (_make_peers(peers, target, model, temperature) if peers else {})
    return {each.text: made[each.text] for each in named}


def _make_loop(named: NamedMethod, target: Target, model: ModelOptions, temperature: float) -> Method:
    """The project's loop. Each conversation has a proposer that has learned nothing yet and shares the models."""
    options = dict(named.options)
    if "draft_model" in options:
        options["draft_model"] = load_target(replace(model, model=options["draft_model"]))
    load = partial(load_proposer, named.name, target, **options)
    cold = load()
    kept = load(store=AnswerStore()) if named.warm else cold

    def begin(is_warm_up: bool) -> Ask:
        used = cold if is_warm_up else kept
        proposer = used.renew() if hasattr(used, "renew") else load()
        return partial(ask_loop, target, proposer, temperature, NODES)

    return begin


def _make_peers(
    named: Sequence[NamedMethod], target: Target, options: ModelOptions, temperature: float
) -> dict[str, Method]:
    """Hugging Face's `generate` in each way, all on one unaccelerated copy of the model.

    Of the model's generation config only the end tokens are kept: penalties or top-k would give peers another
    distribution than the project's loop.
    """
    model, tokenizer = load_model_only(options, "off")
    stops = sorted(target.stop_ids)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(stops), 0)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    model.generation_config = GenerationConfig(eos_token_id=stops or None, pad_token_id=pad, **sampling)
    peers: dict[str, Method] = {}
    for each in named:
        settings = PEERS[each.name] | each.options
        if assistant := settings.pop("draft_model", None):
            settings["assistant_model"], _ = load_model_only(replace(options, model=assistant), "off")
        ask = partial(ask_peer, model, settings)
        peers[each.text] = lambda _, ask=ask: ask  # a peer keeps nothing between calls
    return peers


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
    if isinstance(proposer, MergedProposer):
        proposer.keep_answers()
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
