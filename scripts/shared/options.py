"""The options that choose a model and a proposer, and the functions that load both."""

from __future__ import annotations

import argparse
import logging
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import transformers
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from decode import Proposer, Target
from decode.devices.backend import MODES
from decode.models.adapters import is_adapter
from decode.models.loading import DTYPES, check_model, load_model
from decode.requests.text import Tokenizer
from draftless_commands.shared.command import at_least
from heads import PRETRAINED
from heads.checkpoint import read_target
from heads.formats.written_checkpoint import OTHER_WEIGHTS
from proposers import HEAD_PROPOSERS, AnswerStore, check_options, load_proposer
from proposers.draft_models.loading import is_trained_draft, load_draft_model
from proposers.eagle import DEPTH, WIDTH
from proposers.load import FASTEST
from proposers.options import OPTIONS, DraftingOptions, load_kind
from proposers.own_class import is_own_class

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
ADAPTER_FOLDER = "adapter"  # in a head's folder: the model that was trained with it (Medusa-2)
ACCELERATE_HELP = """on a CPU: packed packs the weights. compiled also compiles the decoder layers: it needs a C++
compiler, 15 seconds once and a second at each start. auto compiles models from 64 MiB on and packs others. On a GPU:
packed makes attention faster, graphs also makes steps CUDA graphs, and so does auto for models that allow it. off
changes nothing (default: %(default)s)"""
OF_HEAD = f"the model that the head was trained for; without a head {DEFAULT_MODEL}, fetched once"
PROPOSER_HELP = """what drafts; it changes the speed, not the text. merged grows one tree from all sources that need no
training; auto adds the pretrained head of the default model. Also a head's folder, or a class of your own as
FILE.py:CLASS (default: %(default)s)"""
HEAD_HELP = f"""for {", ".join(HEAD_PROPOSERS)}, merged, auto: a head's folder, or the kind of a pretrained head of the
default model (default: the pretrained one, if there is one; for mtp the module in the model's checkpoint; for merged
none)"""
NODES_HELP = """for heads, draft, ngram, suffix, recycling, merged, auto: trees of N nodes (default: as many as pay)"""
STORE_HELP = """for suffix, merged, auto: draft from the answers in this file too, and add new ones to it (default: from
the answers of this run alone)"""
DRAFT_MODEL_HELP = "for draft, merged, auto: a smaller model, folder or hub id"
DRAFT_PROPOSER_HELP = """for draft: what drafts for the draft model, such as ngram or a head's folder (staged drafts)"""
HEAD_WINDOW_HELP = """for eagle, eagle3, jump, mtp, peagle, dflash, flashmap, merged, auto: tokens that the head attends
to at most, for texts longer than those that it was trained on (default: as many as in training)"""
SAMPLED_HELP = """for draft: sample the draft tokens. The text keeps its distribution, but a seed gives another text
than plain decoding"""
KIND_HELP = "of a head of your own kind: its class, which is run (docs/training.md)"
DETERMINISTIC_HELP = """choose tree sizes by a fixed cost curve and not by this run's clock: the same trees in every
run, and so the same text in half precision too"""


@dataclass(frozen=True)
class ModelOptions:
    """Which model to load, and how. Raises ValueError for options that exclude each other."""

    model: str | None = None  # folder or hub id; None is the default model
    dtype: str | None = None
    device: str | None = None
    device_map: str | None = None
    accelerate: str = "auto"
    deterministic: bool = False  # of commands with a proposer

    def __post_init__(self) -> None:
        if self.device is not None and self.device_map is not None:
            raise ValueError("--device and --device-map exclude each other; give one of them")
        has_kernels = self.device in (None, "cpu") and self.dtype not in ("float64", "float16")
        if self.accelerate == "compiled" and not has_kernels:
            raise ValueError("--accelerate compiled is for --device cpu and --dtype float32 or bfloat16")

    @property
    def name(self) -> str:
        """A folder's last name, a hub id as it is, or the default model."""
        if self.model is None:
            return DEFAULT_MODEL
        return Path(self.model).resolve().name if Path(self.model).exists() else self.model

    @property
    def public_name(self) -> str | None:
        """The name as others can use it: a hub id, or the default model. None: a path, which is this machine's."""
        return None if self.model is not None and Path(self.model).exists() else self.name

    @property
    def may_be_default(self) -> bool:
        """Whether the model may be the default one, which the pretrained heads are for, or a copy of it."""
        return self.model is None or Path(self.model).exists()

    @classmethod
    def from_args(cls, args: argparse.Namespace, **others: Any) -> Self:
        """The parsed options and `others`; those that the parser does not have keep their defaults."""
        parsed = {field.name: getattr(args, field.name) for field in fields(cls) if hasattr(args, field.name)}
        return cls(**{**parsed, **others})

    def for_heads(self, folders: Iterable[Path]) -> Self:
        """If no model is given, with the one that these heads were trained for.

        Raises ValueError as `find_model` does, and for heads of several models.
        """
        if self.model is not None:
            return self
        found = {find_model(folder): folder for folder in folders}
        if len(found) > 1:
            listed = ", ".join(f"{folder} for {name or DEFAULT_MODEL}" for name, folder in found.items())
            raise ValueError(f"the heads were trained for several models: {listed}; give --model")
        return replace(self, model=next(iter(found), None))


def find_model(folder: Path) -> str | None:
    """The model that the head in a folder was trained for, as `ModelOptions.model`; None: the default model.

    Raises ValueError if it is not known and cannot be the default model, and if there is no such model.
    """
    if is_adapter(folder / ADAPTER_FOLDER):
        return str(folder / ADAPTER_FOLDER)
    trained, default = read_target(folder), read_target(PRETRAINED / "medusa")
    name = trained.target_name
    if trained.target_weights in FASTEST or name == default.target_name:
        return None
    if name is not None:
        try:
            check_model(name)
        except ValueError as error:
            raise ValueError(
                f"{error}; {folder} was trained for this model: give --model if it is elsewhere"
            ) from error
        return name
    pairs = [
        (getattr(trained, size), getattr(default, size)) for size in ("hidden_size", "vocab_size", "target_layers")
    ]
    if trained.target_weights is not None or any(own not in (None, of_default) for own, of_default in pairs):
        raise ValueError(f"the head in {folder} does not name the model that it was trained for; give --model")
    return None


def list_heads(proposer: str, head: str | Path | None) -> list[Path]:
    """The folder of the head that a proposer drafts with, if these options name one."""
    named = proposer if head is None and proposer not in OPTIONS else head
    folder = None if named is None else Path(str(named))
    return [folder] if folder is not None and folder.is_dir() and not is_trained_draft(folder) else []


def add_model_options(parser: argparse.ArgumentParser, default: str = OF_HEAD) -> None:
    """Add the options of `ModelOptions`. default: which model is loaded without --model, for the help."""
    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        metavar="MODEL",
        help=f"a local folder, a hub id, a GGUF file or the folder of a peft adapter (default: {default})",
    )
    add("--dtype", choices=DTYPES, help="number format (default: float32 on a CPU, else the model's)")
    add("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    add("--device-map", help="let accelerate place the layers, e.g. auto (instead of --device)")
    add("--accelerate", choices=MODES, default="auto", help=ACCELERATE_HELP)


def add_proposer_options(parser: argparse.ArgumentParser) -> None:
    """Add --proposer, its options, and --deterministic."""
    add, whole = parser.add_argument_group("drafting").add_argument, at_least(1)
    add("--proposer", default="auto", metavar="NAME", help=f"{', '.join(OPTIONS)}: {PROPOSER_HELP}")
    add("--draft-model", metavar="MODEL", help=DRAFT_MODEL_HELP)
    add("--draft-proposer", metavar="NAME", help=DRAFT_PROPOSER_HELP)
    add("--head", metavar="DIR", help=HEAD_HELP)
    add("--nodes", type=whole, metavar="N", help=NODES_HELP)
    add(
        "--depth",
        type=whole,
        metavar="N",
        help=f"for eagle, eagle3, jump, mtp ({DEPTH}), peagle, dflash, flashmap, draft: tokens ahead at most",
    )
    add(
        "--width",
        type=whole,
        metavar="N",
        help=f"for eagle, eagle3, jump, mtp ({WIDTH}), peagle, dflash, flashmap, draft (1): paths per depth",
    )
    add("--head-window", type=whole, metavar="N", help=HEAD_WINDOW_HELP)
    add("--sampled", action="store_true", help=SAMPLED_HELP)
    add("--deterministic", action="store_true", help=DETERMINISTIC_HELP)


def add_kind_option(parser: argparse.ArgumentParser) -> None:
    """Add --kind, for heads of the user's own kind."""
    parser.add_argument("--kind", type=parse_own_kind, metavar="FILE.py:CLASS", help=KIND_HELP)


def parse_own_kind(text: str) -> str:
    """The name of a kind of head. One of the user's own, FILE.py:CLASS, is loaded from its file."""
    try:
        return load_kind(text).name if is_own_class(text) else text
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def load_target(options: ModelOptions) -> Target:
    """The model, accelerated, as a target. Raises ValueError if it cannot be loaded."""
    settings = asdict(options)
    with _loading():
        return Target.load(settings.pop("model"), **settings)


def load_model_only(options: ModelOptions) -> tuple[PreTrainedModel, Tokenizer]:
    """The model as it is, and its tokenizer. Raises ValueError if it cannot be loaded."""
    with _loading():
        return load_model(options.model, dtype=options.dtype, device=options.device, device_map=options.device_map)


def fetch_checkpoint(name: str) -> Path:
    """The folder of a checkpoint; one on the hub is fetched. Raises ValueError if there is none."""
    if Path(name).is_dir():
        return Path(name)
    try:
        with _loading():
            return Path(snapshot_download(name, ignore_patterns=[f"*{ending}" for ending in OTHER_WEIGHTS]))
    except (OSError, ValueError) as error:
        reason = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise ValueError(f"{name} is no folder of a checkpoint; as a hub id: {reason}") from error


def load_draft(options: ModelOptions, whole: bool = False) -> Target:
    """A model to draft with, as `load_draft_model` loads it. Raises ValueError if it cannot be loaded."""
    settings = asdict(options)
    with _loading():
        return load_draft_model(settings.pop("model"), whole=whole, **settings)


@contextmanager
def _loading() -> Iterator[None]:
    """Show no progress bars and warnings of transformers: they would hide the one line that matters."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        yield
    except (RuntimeError, ImportError) as error:  # no network for the default model, no memory, no accelerate
        raise ValueError(str(error)) from error


def read_drafting(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the proposer, as `check_options` takes them."""
    return {field.name: getattr(args, field.name) for field in fields(DraftingOptions)}


def choose_model(args: argparse.Namespace) -> ModelOptions:
    """The model of a command with a proposer. Raises ValueError for options that do not fit the proposer."""
    model = ModelOptions.from_args(args)
    check_options(args.proposer, read_drafting(args), pretrained=model.may_be_default)
    return model.for_heads(list_heads(args.proposer, args.head))


def make_proposer(args: argparse.Namespace, target: Target, store: AnswerStore | None) -> Proposer:
    """The proposer of the options, with the draft model or head that it needs.

    Raises ValueError if draft model or head cannot be loaded or do not fit the target.
    """
    settings = read_drafting(args) | {"store": store}
    if args.draft_model is not None:
        chosen = ModelOptions.from_args(args, model=args.draft_model)
        settings["draft_model"] = load_draft(chosen, whole=args.draft_proposer is not None)
    return load_proposer(args.proposer, target, **settings)
