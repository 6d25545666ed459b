"""The models of a bench: the project's target and draft, and second copies of both, as they come, for the peers."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from decode import Target
from decode.models.loading import first_layers
from proposers import HEAD_PROPOSERS, PROPOSERS, DraftProposer, load_proposer
from proposers.load import EAGLES
from scripts.bench_methods import PEERS, Loop, Method, Peer
from scripts.options import DRAFT_LAYERS, TREES, find_head, load_by_options

NODES = 64  # the most of a tree


def load_ours(name: str | None, args: argparse.Namespace) -> Target:
    """A target of the project's loop, accelerated as `--accelerate` says."""
    return Target(*load_by_options(args, name))


def make_loops(names: Sequence[str], target: Target, args: argparse.Namespace) -> dict[str, Method]:
    """The project's loop with each proposer."""
    loops: dict[str, Method] = {}
    for name in names:
        kind, settings = split_method(name)
        make: Any = PROPOSERS[kind]
        if kind == "draft":
            make = partial(make, _load_draft(target, args))
        elif kind in HEAD_PROPOSERS:
            folder = find_head(kind, dict(args.head).get(kind), args.model)
            make = load_proposer(kind, target, head=folder, **settings).renew
        loops[name] = Loop(target, make, args.temperature, settings.get("nodes", NODES))
    return loops


def split_method(name: str) -> tuple[str, dict[str, Any]]:
    """The proposer that a method's name stands for, and how `load_proposer` is to set it.

    "hydra" chooses its nodes itself, "hydra-16" has trees of 16, "hydra-static-16" has 16 nodes of the static tree;
    "eagle3-chain-5" guesses 5 tokens in a row; "hydra-sampled-16" draws its guesses at random. Raises ValueError where
    there is no such method.
    """
    kind, *rest = name.split("-")
    if kind not in PROPOSERS:
        raise ValueError(f"unknown method {name!r}; choose from {', '.join(PROPOSERS)}")
    number = int(rest.pop()) if rest and rest[-1].isdecimal() else None
    drawn = {"sampled": True} if rest[:1] == ["sampled"] else {}
    rest = rest[len(drawn) :]
    if rest == ["chain"] and kind in EAGLES and number:
        return kind, {"width": 1, "depth": number, "nodes": 1 + number} | drawn
    tree = rest.pop() if rest else "dynamic"
    if rest or tree not in TREES or number == 0 or (name != kind and kind not in HEAD_PROPOSERS):
        raise ValueError(
            f"unknown method {name!r}; trees and numbers of nodes are for {', '.join(HEAD_PROPOSERS)}, as in hydra-16 or "
            f"hydra-static-16, with one of {', '.join(TREES)}; chains for {', '.join(EAGLES)}, as in eagle3-chain-5; "
            "and drafts that are drawn at random, as in hydra-sampled-16"
        )
    return kind, {"tree": tree} | drawn | ({} if number is None else {"nodes": number})


def make_peers(names: Sequence[str], target: Target, args: argparse.Namespace) -> dict[str, Method]:
    """Hugging Face's `generate` in each way, on one stock model.

    The model loses what its generation config says beside the end tokens (penalties, top-k): everyone is to draw from
    the same law.
    """
    if not names:
        return {}
    model, tokenizer = load_by_options(args, args.model, "off")
    stops = sorted(target.stop_ids)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(stops), 0)
    sampled: dict[str, Any] = {"do_sample": True, "temperature": args.temperature, "top_k": 0}
    chance = sampled if args.temperature else {}
    model.generation_config = GenerationConfig(eos_token_id=stops or None, pad_token_id=pad, **chance)
    given: dict[str, Any] = {}
    if "hf-assistant" in names:
        given["assistant_model"] = _load_assistant(model, args)
    return {name: Peer(model, {key: given.get(key, value) for key, value in PEERS[name].items()}) for name in names}


def _load_draft(target: Target, args: argparse.Namespace) -> Target:
    if args.draft_model is None:
        return Target(first_layers(target.model, DRAFT_LAYERS), target.tokenizer)
    draft = load_ours(args.draft_model, args)
    DraftProposer(draft).check(target)
    return draft


def _load_assistant(model: PreTrainedModel, args: argparse.Namespace) -> PreTrainedModel:
    if args.draft_model is not None:
        return load_by_options(args, args.draft_model, "off")[0]
    assistant = first_layers(model, DRAFT_LAYERS)
    assistant.generation_config = copy.deepcopy(model.generation_config)  # else it is the model's own, and written to
    return assistant
