"""What is trained: a new head for the target, or one that exists, and what it minimises."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from decode import Target
from heads import HEADS, LayerConfig, choose_features
from heads.checkpoint import load_head
from proposers.load import EAGLES
from training.data import Dataset
from training.eagle import EagleObjective
from training.objective import HeadObjective, Objective
from training.teacher import Teacher
from training.vocabulary import choose_tokens

TTT_STEPS = 3
REGRESSION = {"eagle": 10.0, "eagle3": 0.0}  # EAGLE-3 is EAGLE without it: its states are not features
SAMPLE = 8  # examples from which a new head's norm learns how large features are


def make_head(args: argparse.Namespace, target: Target, dataset: Dataset) -> Any:
    """A new head for the target, its vocabulary begun as the target's own."""
    torch.manual_seed(args.seed)
    network, shape = HEADS[args.head]
    vocab = target.vocabulary
    draft_size = min(args.draft_vocab or vocab, vocab)
    sizes = shape_unrolled(args, target) if args.head in EAGLES else shape_heads(args, target)
    head: Any = network(shape(target.config.hidden_size, vocab, draft_size=draft_size, **sizes, **_origin(target)))
    if draft_size < vocab:
        chosen, _ = choose_tokens(dataset.examples, vocab, draft_size)
        head.token_map.copy_(chosen)
    head.borrow(target.output_matrix, target.output_bias)
    if args.head == "eagle3":
        match_norm(head, target, dataset)
    if args.prefix:  # at first it changes nothing: its layer adds nothing, its norm keeps the features' size
        features = Teacher(target, head.features).view(dataset.examples[:1])[0].features
        head.prefix.norm.weight.data.fill_(features.float().square().mean().sqrt())
    return head


def shape_heads(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    """The shape of Medusa and Hydra heads, as far as options say it."""
    given: dict[str, Any] = {name: getattr(args, name) for name in ("heads", "layers", "output")}
    given["prefix"] = shape_layer(target) if args.prefix else None
    return {name: value for name, value in given.items() if value is not None}


def shape_unrolled(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    """The shape of an EAGLE head for the target."""
    config = target.config
    own = {"max_position_embeddings": getattr(config, "max_position_embeddings", None)}
    if args.head == "eagle":
        return own | {"layer": shape_layer(target, input_norm=False)}
    return own | {"layer": shape_layer(target), "features": choose_features(config.num_hidden_layers)}


def shape_layer(target: Target, input_norm: bool = True) -> LayerConfig:
    """A decoder layer of the target's own sizes, as far as it has ordinary ones."""
    config = target.config
    heads = config.num_attention_heads
    return LayerConfig(
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        input_norm=input_norm,
    )


@torch.no_grad()
def match_norm(head: Any, target: Target, dataset: Dataset) -> None:
    """Let a new EAGLE-3 head's last norm give each channel the size that it has where the target's output reads it."""
    views = Teacher(target, (*head.features, -1)).view(dataset.examples[:SAMPLE])
    features = torch.cat([view.features for view in views]).float().cpu()
    deep, last = features.split([features.shape[1] - head.hidden_size, head.hidden_size], dim=1)
    normed = head.norm(head.fuse(deep))
    head.norm.weight.copy_(last.abs().median(dim=0).values / normed.abs().median(dim=0).values.clamp(min=1e-6))


def _origin(target: Target) -> dict[str, Any]:
    """What the head's folder says of its target: of a model that lies here, the folder's name alone."""
    name = target.model.config.name_or_path
    return {
        "target_layers": target.config.num_hidden_layers,
        "target_name": (Path(name).name if Path(name).exists() else name) or None,
    }


def load_init(args: argparse.Namespace, target: Target) -> Any:
    """The head of --init. Raises ValueError where it is not what the other options ask for, or for another target."""
    head = load_head(args.init, torch.float32, target.vocabulary, target.config.num_hidden_layers)
    if head.kind != args.head:
        raise ValueError(f"--init {args.init} holds a head of kind {head.kind}, not {args.head}")
    own = {name: getattr(head.config, name, None) for name in ("heads", "layers", "output")}
    for name, value in (own | {"draft_vocab": head.draft_size}).items():
        if getattr(args, name) not in (None, value):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is {getattr(args, name)}, and the head of --init {args.init} has {value}")
    try:
        head.check_target(target.config.hidden_size, target.vocabulary, target.config.num_hidden_layers)
    except ValueError as error:
        raise ValueError(f"--init {args.init}: {error}") from error
    if head.output == "target":
        head.borrow(target.output_matrix, target.output_bias)
    return head


def make_objective(args: argparse.Namespace, target: Target, head: Any) -> Objective:
    """What the head minimises, as the options say."""
    if args.head == "medusa":
        return HeadObjective(head, args.loss, None, args.decay)
    embeddings = target.model.get_input_embeddings()
    with torch.no_grad():
        table = embeddings(torch.arange(target.vocabulary, device=target.device))  # scaled, where the model scales
    if args.head == "hydra":
        return HeadObjective(head, args.loss, table, args.decay)
    if head.embed_tokens is not None:
        table = head.embed_tokens.requires_grad_(False).weight
    return EagleObjective(head, args.loss, table, **_unrolling(args), decay=args.decay)


def describe_objective(args: argparse.Namespace) -> dict[str, Any]:
    """What of it a training that is resumed must have been begun with."""
    return {"loss": args.loss, "decay": args.decay, **(_unrolling(args) if args.head in EAGLES else {})}


def _unrolling(args: argparse.Namespace) -> dict[str, Any]:
    regression = args.regression if args.regression is not None else REGRESSION[args.head]
    return {"steps": args.ttt_steps or TTT_STEPS, "regression": regression, "noise": args.noise or 0.0}
