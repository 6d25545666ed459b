"""What the scripts share: the options that choose a model and a proposer, and how a script fails."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel

from decode import Proposer, Target
from decode.cpu.acceleration import MODES
from decode.models.loading import DTYPES, first_layers, load_model
from decode.text import Tokenizer
from heads import PRETRAINED
from heads.checkpoint import find_folder
from proposers import HEAD_PROPOSERS, PROPOSERS, NGramProposer, load_best, load_proposer
from proposers.eagle import DEPTH, WIDTH
from proposers.fixed_trees import PUBLISHED
from proposers.load import EAGLES

AUTO = "auto"
DRAFT_LAYERS = 8  # of the default model, where no draft model is named
TREES = ("dynamic", "calibrated", "static", *PUBLISHED)
INTERRUPTED, UNREAD = 128 + 2, 128 + 13  # what a shell reports of programs that SIGINT or SIGPIPE ended


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong in one line, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.fail(f"{message} (see {self.prog} --help)")

    def fail(self, message: str) -> NoReturn:
        """End the program: one line on stderr, exit status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that `load_target` reads."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", help="a local folder or a hub id (default: SmolLM2-135M-Instruct, fetched once)")
    group.add_argument("--dtype", choices=DTYPES, help="number format (default: float32 on a CPU, else the model's)")
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU where there is one)")
    group.add_argument("--device-map", help="let accelerate place the layers, e.g. auto (instead of --device)")
    group.add_argument(
        "--accelerate",
        choices=MODES,
        default="auto",
        help="on a CPU: packed weights; compiled kernels for passes over few tokens, which take a C++ compiler, a minute "
        "the first time, a second at each start, and twice the model's memory; auto compiles models of 64 MiB to 2 GiB "
        "and packs others; off changes nothing (default: %(default)s)",
    )


def add_proposer_options(parser: argparse.ArgumentParser) -> None:
    """The options that `check_proposer` and `make_proposer` read."""
    group = parser.add_argument_group("guessing")
    group.add_argument(
        "--proposer",
        choices=(*PROPOSERS, AUTO),
        default="ngram",
        help="what guesses ahead; it changes the speed, never the text; auto takes the best trained head that fits the "
        "model, ngram where there is none (default: %(default)s)",
    )
    group.add_argument(
        "--draft-model",
        help="for --proposer draft: a smaller model with the same vocabulary, folder or hub id "
        f"(default, with the default model only: its own first {DRAFT_LAYERS} layers)",
    )
    group.add_argument(
        "--head",
        metavar="DIR",
        help=f"for --proposer {', '.join(HEAD_PROPOSERS)}, {AUTO}: the folder of a head trained for the model (default, with "
        "the default model only: its pretrained one)",
    )
    group.add_argument(
        "--tree",
        choices=TREES,
        metavar="NAME",
        help="for trained heads: dynamic, what is likeliest in each text (the default); calibrated, what was best "
        f"when the head was measured; static, the method's own, or another published one: {', '.join(PUBLISHED)}",
    )
    group.add_argument(
        "--nodes",
        type=at_least(1),
        metavar="N",
        help="for trained heads: trees of N nodes (default: as many as pay on this device, which may be none)",
    )
    eagles = ", ".join(EAGLES)
    group.add_argument(
        "--depth", type=at_least(1), metavar="N", help=f"for {eagles}: guess N tokens ahead at most (default: {DEPTH})"
    )
    group.add_argument(
        "--width",
        type=at_least(1),
        metavar="N",
        help=f"for {eagles}: follow the N likeliest paths at each depth; 1 guesses a chain (default: {WIDTH})",
    )
    group.add_argument(
        "--sampled",
        action="store_true",
        help="for trained heads, at temperatures above 0: draw guesses at random; the law of the text stays the same, "
        "but a seed gives another one than without guessing",
    )


def check_proposer(name: str, args: argparse.Namespace) -> None:
    """Raise ValueError where the options cannot make this proposer; needs no model."""
    check_devices(args)
    if name == "draft" and args.draft_model is None and args.model is not None:
        raise ValueError("--proposer draft needs --draft-model, a smaller model with the vocabulary of --model")
    if name in HEAD_PROPOSERS or (name == AUTO and args.head is not None):
        find_head(name, args.head, args.model)


def check_devices(args: argparse.Namespace) -> None:
    """Raise ValueError where the options of `add_model_options` exclude each other."""
    if args.device is not None and args.device_map is not None:
        raise ValueError("--device and --device-map exclude each other; give one of them")
    if args.accelerate == "compiled" and (args.device not in (None, "cpu") or args.dtype in ("float64", "float16")):
        raise ValueError("--accelerate compiled is for --device cpu and --dtype float32 or bfloat16")


def find_head(kind: str, folder: str | None, model: str | None) -> Path:
    """The folder of the head to draft with. Raises ValueError where there is none."""
    if folder is not None:
        return find_folder(folder)
    if model is not None:
        raise ValueError(f"{kind} needs --head, the folder of a {kind} head that was trained for --model")
    if kind not in list_pretrained(model):
        raise ValueError(f"{kind} needs --head: there is no pretrained head in {PRETRAINED / kind}")
    return PRETRAINED / kind


def list_pretrained(model: str | None) -> dict[str, Path]:
    """The heads that come with a model, by kind: the default one's; another model has none, of whatever sizes."""
    found = {kind: PRETRAINED / kind for kind in HEAD_PROPOSERS} if model is None else {}
    return {kind: folder for kind, folder in found.items() if folder.is_dir()}


def load_target(args: argparse.Namespace, name: str | None = None) -> Target:
    """The model of `--model`, or another one in its place, as a target."""
    return Target(*load_by_options(args, name or args.model))


def load_by_options(
    args: argparse.Namespace, name: str | None, accelerate: str | None = None
) -> tuple[PreTrainedModel, Tokenizer]:
    """A model by name, or the default one, with its tokenizer, by the options of `add_model_options`.

    accelerate: in the place of the option's value.
    """
    _silence_transformers()
    try:
        return load_model(
            name,
            dtype=args.dtype,
            device=args.device,
            device_map=args.device_map,
            accelerate=accelerate or args.accelerate,
        )
    except (RuntimeError, ImportError) as error:  # e.g. no default model without a network; no memory; no accelerate
        raise ValueError(str(error)) from error


def make_proposer(name: str, target: Target, args: argparse.Namespace) -> Proposer:
    """A proposer from `PROPOSERS` by its name, or what `auto` chooses; loads the draft model or head that it needs."""
    if name in HEAD_PROPOSERS:
        folder = find_head(name, args.head, args.model)
        shape = {"tree": args.tree, "nodes": args.nodes, "depth": args.depth, "width": args.width}
        return load_proposer(name, target, head=folder, **shape, sampled=args.sampled)
    if name == AUTO and args.head is not None:
        return load_proposer(AUTO, target, head=args.head)
    if name == AUTO:
        return load_best(target, list_pretrained(args.model).values()) or NGramProposer()
    kind: Any = PROPOSERS[name]
    if name != "draft":
        return kind()
    if args.draft_model is None:
        draft = Target(first_layers(target.model, DRAFT_LAYERS), target.tokenizer)
    else:
        draft = load_target(args, args.draft_model)
    proposer = kind(draft)
    proposer.check(target)
    return proposer


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from `low` on."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} on")
        return number

    return parse


@contextmanager
def failing_clearly(parser: Parser) -> Iterator[None]:
    """End the program without a traceback: bad input in one line and status 2, Ctrl-C with 130, a closed pipe."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script may have set it aside for its imports
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader has what it wanted. What Python flushes at the end must not find the pipe closed again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(UNREAD) from None
    except OSError as error:
        parser.fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except (ValueError, torch.OutOfMemoryError, SafetensorError) as error:  # the last is of a full disk, too
        parser.fail(str(error))


def _silence_transformers() -> None:
    """Its progress bars and advice would stand between a user and the one line that matters."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
