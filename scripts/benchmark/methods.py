"""The compared methods: the project's loop with any proposer, Hugging Face's `generate`, and other programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any

from decode import Proposer, Sampling, Target, stream
from decode.requests.answer import PARTS
from draftless_commands.benchmark.measurement import Ask, Measured, Method, TokenIds, clock
from draftless_commands.benchmark.peers import PEERS, OtherProgram, check_peer, is_own_method, load_stock, make_peer
from draftless_commands.shared.options import ModelOptions, load_draft
from draftless_commands.shared.terminal import list_answers
from proposers import AnswerStore, MergedProposer, check_options, load_proposer
from proposers.options import OPTIONS

METHODS_HELP = f"""comma-separated. A proposer as for --proposer, with its options after a colon:
merged:nodes=16,head=hydra; a class of your own, a proposer or another program: FILE.py:CLASS; transformers'
{", ".join(PEERS)}, with arguments of generate or draft_model=MODEL as options. warm=true keeps answers between
questions. none is always added"""
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
        check_peer(named.text, named.options)
        if batch_size > 1:
            raise ValueError(f"{named.text} answers one question at a time; leave it out, or --batch-size")
        return
    if is_own_method(named.name):
        if named.options or named.warm:
            raise ValueError(f"{named.text}: a program of your own has no options")
        return
    check_options(named.name, named.options, pretrained=pretrained)
    if "store" in named.options:
        raise ValueError(f"{named.text}: a store is not read here; warm=true keeps answers between questions")
    if named.warm and "store" not in OPTIONS.get(named.name, ()):
        raise ValueError(f"{named.text}: warm is for suffix, merged and auto, which draft from earlier answers")
    if named.warm and repeats > 1:
        raise ValueError(f"{named.text} would draft from its answer to the same question; give --repeats 1")


def _read_value(text: str) -> Any:
    """A whole number, another finite number, true or false, or else text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with suppress(ValueError):
            if isfinite(value := kind(text)):
                return value
    return text


def make_methods(
    named: Sequence[NamedMethod], target: Target, model: ModelOptions, temperature: float
) -> dict[str, Method]:
    """The methods by their texts, with their draft models, heads and peers loaded. Other programs are not yet."""
    others = [each.name for each in named if each.name in PEERS or is_own_method(each.name)]
    stock = load_stock(target, model, temperature) if others else None

    def make(each: NamedMethod) -> Method:
        if each.name not in others:
            return _make_loop(target, model, temperature, each)
        if each.name in PEERS:
            return make_peer(stock, target.tokenizer, model, each.name, each.options)
        return OtherProgram(each.name, stock, target.tokenizer)

    return {each.text: make(each) for each in named}


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
        return partial(ask_loop, target, proposer, temperature, options.get("nodes"))

    return begin


def ask_loop(
    target: Target,
    proposer: Proposer,
    temperature: float,
    nodes: int | None,
    prompts: TokenIds,
    seed: int,
    max_new_tokens: int,
) -> Measured:
    """Answer the prompts as one batch with the project's loop."""
    settings = {"sampling": Sampling(temperature, seed=seed), "max_new_tokens": max_new_tokens, "nodes": nodes}
    before = Counter(getattr(proposer, "accepted_by_source", {}))
    chunks, seconds = clock(lambda: [*stream(target, prompts, proposer, text=False, **settings)], target.device)
    if isinstance(proposer, MergedProposer):
        proposer.keep_answers()
    answers = list_answers(chunks)
    longest = max((answer.stats.seconds for answer in answers), key=lambda spent: spent.total)  # of the whole batch
    return Measured(
        [answer.tokens for answer in answers],
        [[len(chunk.tokens) for chunk in chunks if chunk.request_id == row] for row in range(len(prompts))],
        seconds,
        [answer.text for answer in answers],
        [answer.stats.nodes for answer in answers],
        {part: getattr(longest, part) for part in PARTS} if not target.backend.waits else None,
        {name: count - before[name] for name, count in getattr(proposer, "accepted_by_source", {}).items()} or None,
    )
