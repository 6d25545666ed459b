"""The second stage of training, in which the model learns with the head: its options, and what it is made of."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from decode import Target
from scripts.shared.command import at_least
from training.joint import JointObjective, UntouchedTeacher, save_adapted
from training.lora import Adapters
from training.objective import HeadObjective

MODEL = "model"  # the adapted model's folder, in the head's
EPILOG = """\

--joint is Medusa-2: the model learns as well, through low-rank adapters, to be easier to guess, and is held to what it
said before. Its text still changes a little. So the best head comes with a model of its own, --out/model, an ordinary
folder with the adapters merged; decoding with both is lossless with respect to that model, not to the untouched one.
"""


def add_joint_options(parser: argparse.ArgumentParser) -> None:
    """The options that `join` reads."""
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--joint",
        action="store_true",
        help="let the model learn with the head, and write it to --out/model, since its text changes (see below); "
        "start from a trained head, with --init, or the model suffers from a fresh one's mistakes",
    )
    group.add_argument(
        "--lora-rank", type=at_least(1), default=32, metavar="N", help="of what it learns, with --joint (default: 32)"
    )


def join(
    args: argparse.Namespace, target: Target, heads: HeadObjective, save_head: Callable[[], None]
) -> tuple[JointObjective, UntouchedTeacher, Callable[[], None]]:
    """The target gets adapters. Returns what is trained, what it learns from, and what saves head and model."""
    torch.manual_seed(args.seed)
    adapters = Adapters(target.model, args.lora_rank)

    def save() -> None:
        save_adapted(target, adapters, args.out / MODEL)
        save_head()

    return JointObjective(target, adapters, heads), UntouchedTeacher(target, heads.head.features, adapters), save
