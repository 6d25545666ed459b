"""The methods of a benchmark with their models: targets, draft models and heads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from transformers import GenerationConfig, PreTrainedModel

from decode import Proposer, Target
from decode.models.loading import first_layers
from proposers import DraftProposer, HeadProposer
from proposers.load import DRAFT_LAYERS
from scripts.benchmark.methods import PEERS, Ask, Method, ask_loop, ask_peer
from scripts.benchmark.options import BenchOptions, parse_method
from scripts.shared.options import load_model_only, make_proposer

NODES = 64  # largest draft tree


def make_loops(options: BenchOptions, target: Target) -> dict[str, Method]:
    """The project's loop with the proposer of each method."""
    loops: dict[str, Method] = {}
    for name in options.methods:
        drafting = parse_method(name)
        if drafting.proposer == "draft":
            drafting = replace(drafting, draft_model=options.draft_model)
        drafting = replace(drafting, head=options.heads.get(drafting.proposer))
        renew = repeat_proposer(make_proposer(drafting, target, options.model))
        loops[name] = partial(open_loop, target, renew, options.temperature, drafting.nodes or NODES)
    return loops


def open_loop(target: Target, renew: Callable[[], Proposer], temperature: float, nodes: int) -> Ask:
    """Begin a conversation with a new proposer."""
    return partial(ask_loop, target, renew(), temperature, nodes)


def repeat_proposer(proposer: Proposer) -> Callable[[], Proposer]:
    """Makes proposers like this one that have learned nothing yet and share its models."""
    if isinstance(proposer, HeadProposer):
        return proposer.renew
    return partial(DraftProposer, proposer.draft) if isinstance(proposer, DraftProposer) else type(proposer)


def make_peers(options: BenchOptions, target: Target) -> dict[str, Method]:
    """Hugging Face's `generate` in each way, all on one unaccelerated copy of the model.

    Of the model's generation config only the end tokens are kept: penalties or top-k would give peers another
    distribution than the project's loop.
    """
    if not options.peers:
        return {}
    model, tokenizer = load_model_only(options.model, "off")
    stops = sorted(target.stop_ids)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(stops), 0)
    sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0} if options.temperature else {}
    model.generation_config = GenerationConfig(eos_token_id=stops or None, pad_token_id=pad, **sampling)
    peers = {name: dict(PEERS[name]) for name in options.peers}
    if "hf-assistant" in peers:
        peers["hf-assistant"]["assistant_model"] = _load_assistant(model, options)
    # A conversation with a peer has no state, so opening one only binds the arguments.
    return {name: partial(partial, ask_peer, model, settings) for name, settings in peers.items()}


def _load_assistant(model: PreTrainedModel, options: BenchOptions) -> PreTrainedModel:
    if options.draft_model is not None:
        return load_model_only(replace(options.model, model=options.draft_model), "off")[0]
    assistant = first_layers(model, DRAFT_LAYERS)
    assistant.generation_config = copy.deepcopy(model.generation_config)  # transformers writes to it
    return assistant
