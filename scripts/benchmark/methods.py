"""The compared methods: the project's loop with any proposer, and Hugging Face's `generate`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import isfinite
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from decode import Proposer, Sampling, Target, stream
from decode.models.fingerprint import fingerprint_vocabulary
from decode.models.loading import FIXED16, check_model
from decode.requests.answer import PARTS
from decode.requests.text import Tokenizer
from draftless_commands.shared.options import ModelOptions, load_draft, load_model_only
from proposers import AnswerStore, MergedProposer, check_options, load_proposer

# Transformers' own methods, and their arguments of `generate`.
PEERS: dict[str, dict[str, Any]] = {"hf": {}, "hf-prompt-lookup": {"prompt_lookup_num_tokens": 10}}
METHODS_HELP = f"""comma-separated. A proposer as for --proposer, with its options after a colon:
merged:nodes=16,head=hydra; a class of your own: FILE.py:CLASS; transformers' {" and ".join(PEERS)}, with arguments
of generate or draft_model=MODEL as options. warm=true keeps answers between questions. none is always added"""
SPEC = re.compile(r"(.+?)(?::(\w+=.*))?")  # a name, which may be FILE.py:CLASS, and options


@dataclass(frozen=True)
class NamedMethod:
    """A method as it is given on the command line. text: the row's name."""

    text: str
    name: str
    options: dict[str, Any]
    warm: bool


def parse_methods(text: str) -> list[NamedMethod]:
    """The methods of a list such as "none,merged:nodes=16,head=hydra,my.py:Mine"; plain decoding is the first one.

    A part that begins with NAME= is an option of the method before it. Raises ValueError for other forms.
    """
    if not text.strip():
        raise ValueError(f"--methods is {text!r}; name a method, for example none")
    found = []
    specs = re.split(r",(?!\w+=)", re.sub(r"\s*,\s*", ",", text.strip()))
    for spec in dict.fromkeys(("none", *filter(None, specs))):
        name, listed = SPEC.fullmatch(spec).groups("")  # type: ignore[union-attr]
        if re.match(r"\w+=", name):
            raise ValueError(f"--methods begins with the option {name!r}; name a method first")
        pairs = (pair.partition("=") for pair in listed.split(",") if pair)
        options = {option: _read_value(value) for option, _, value in pairs}
        found.append(NamedMethod(spec, name, options, bool(options.pop("warm", False))))
    return found


def check_method(named: NamedMethod, *, pretrained: bool, batch_size: int, repeats: int) -> None:
    """Raise ValueError for options that a method does not take, or that do not fit those of the benchmark.

    pretrained: whether there are pretrained heads for the model.
    """
    if named.name in PEERS:
        _check_peer(named)
        if batch_size > 1:
            raise ValueError(f"{named.text} answers one question at a time; leave it out, or --batch-size")
        return
    check_options(named.name, named.options, pretrained=pretrained)
    if "store" in named.options:
        raise ValueError(f"{named.text}: a store is not read here; warm=true keeps answers between questions")
    if named.warm and named.name not in ("merged", "auto"):
        raise ValueError(f"{named.text}: warm is for merged and auto, which draft from earlier answers")
    if named.warm and repeats > 1:
        raise ValueError(f"{named.text} would draft from its answer to the same question; give --repeats 1")


def _check_peer(named: NamedMethod) -> None:
    """Raise ValueError for an option that is no setting of transformers' `generate`, and for a missing draft model."""
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_") and name != "transformers_version"}
    for option, value in named.options.items():
        if option == "draft_model":
            check_model(value)
        elif option not in known:
            hint = "; give draft_model=MODEL" if option == "assistant_model" else ""
            raise ValueError(f"{named.text}: transformers' generate has no setting {option}{hint}")


def _read_value(text: str) -> Any:
    """A whole number, another finite number, true or false, or else text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with suppress(ValueError):
            if isfinite(value := kind(text)):
                return value
    return text


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


TokenIds: TypeAlias = Sequence[list[int]]  # of prompts
Ask: TypeAlias = Callable[[TokenIds, int, int], Measured]  # takes prompts, seed and `max_new_tokens`
# Begins a conversation with a proposer that has learned nothing. True: it is the warm-up, whose answers are not kept.
Method: TypeAlias = Callable[[bool], Ask]


def make_methods(
    named: Sequence[NamedMethod], target: Target, model: ModelOptions, temperature: float
) -> dict[str, Method]:
    """The methods by their texts, with their draft models, heads and peers loaded."""
    stock = _load_stock(target, model, temperature) if any(each.name in PEERS for each in named) else None
    loop, peer = partial(_make_loop, target, model, temperature), partial(_make_peer, stock, target.tokenizer, model)
    return {each.text: peer(each) if each.name in PEERS else loop(each) for each in named}


def _make_loop(target: Target, model: ModelOptions, temperature: float, named: NamedMethod) -> Method:
    """The project's loop. Each conversation has a proposer that has learned nothing yet and shares the models."""
    options = dict(named.options)
    if "draft_model" in options:
        chosen = replace(model, model=options["draft_model"])
        options["draft_model"] = load_draft(chosen, whole="draft_proposer" in options)
    load = partial(load_proposer, named.name, target, **options)
    cold = load()
    kept = load(store=AnswerStore()) if named.warm else cold

    def begin(is_warm_up: bool) -> Ask:
        used = cold if is_warm_up else kept
        proposer = used.renew() if hasattr(used, "renew") else load()
        return partial(ask_loop, target, proposer, temperature)

    return begin


def _load_stock(target: Target, options: ModelOptions, temperature: float) -> PreTrainedModel:
    """An unaccelerated copy of the model for all peers.

    Of its generation config only the end tokens are kept: penalties or top-k would give peers another distribution than
    the project's loop. transformers rounds no inputs to 16 bits: for fixed16 its weights are in float32.
    """
    dtype = None if options.dtype == FIXED16 else options.dtype
    model, tokenizer = load_model_only(replace(options, dtype=dtype))
    stops = sorted(target.stop_ids)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(stops), 0)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    model.generation_config = GenerationConfig(eos_token_id=stops or None, pad_token_id=pad, **sampling)
    return model


def _make_peer(
    stock: PreTrainedModel | None, tokenizer: Tokenizer | None, options: ModelOptions, named: NamedMethod
) -> Method:
    """Hugging Face's `generate`, which keeps nothing between calls."""
    settings = PEERS[named.name] | named.options
    if assistant := settings.pop("draft_model", None):
        settings["assistant_model"], other = load_model_only(replace(options, model=assistant))
        if tokenizer is not None and fingerprint_vocabulary(other) != fingerprint_vocabulary(tokenizer):
            settings |= {"tokenizer": tokenizer, "assistant_tokenizer": other}  # its "universal assisted decoding"
    return lambda _: partial(ask_peer, stock, settings)


def ask_loop(
    target: Target, proposer: Proposer, temperature: float, prompts: TokenIds, seed: int, max_new_tokens: int
) -> Measured:
    """Answer the prompts as one batch with the project's loop."""
    settings = {"sampling": Sampling(temperature, seed=seed), "max_new_tokens": max_new_tokens}
    before = Counter(getattr(proposer, "accepted_by_source", {}))
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
        {part: getattr(longest, part) for part in PARTS} if not target.backend.waits else None,
        {name: count - before[name] for name, count in getattr(proposer, "accepted_by_source", {}).items()} or None,
    )


def ask_peer(
    model: PreTrainedModel, options: Mapping[str, Any], prompts: TokenIds, seed: int, max_new_tokens: int
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
    settings["stopping_criteria"] = StoppingCriteriaList([note_length])
    try:
        output, seconds = clock(lambda: model.generate(ids, **settings), model.device)
    except TypeError as error:
        raise ValueError(f"transformers' generate refuses {options}: {error}") from error
    return Measured(
        [output[0, ids.shape[1] :].tolist()], [[after - before for before, after in pairwise(lengths)]], seconds
    )


def clock(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of `work`, and its seconds, GPU work included."""
    wait = torch.get_device_module(device).synchronize
    wait(device)
    begun, result = perf_counter(), work()
    wait(device)
    return result, perf_counter() - begun
