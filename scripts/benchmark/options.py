"""The options of bench.py."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode import Sampling
from heads import PRETRAINED
from proposers import HEAD_PROPOSERS, PROPOSERS
from scripts.benchmark.method_names import GROWN, HEADS, METHODS_HELP, parse_method
from scripts.benchmark.questions import Question, digest_questions
from scripts.shared.command import at_least, check_writable, named_value
from scripts.shared.options import (
    DRAFT_MODEL_HELP,
    ModelOptions,
    Options,
    ProposerOptions,
    add_model_options,
)

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
PASS_ROUNDS = 15
# The arguments of each peer's `generate`; "assistant_model" is filled in when the model is loaded.
PEERS: dict[str, dict[str, Any]] = {
    "hf": {},
    "hf-prompt-lookup": {"prompt_lookup_num_tokens": 10},
    "hf-prompt-lookup-5": {"prompt_lookup_num_tokens": 5},
    "hf-assistant": {"assistant_model": None},
}
PEERS_HELP = f"""comma-separated, of {", ".join(PEERS)}; hf is always added; "" for none (default: hf,
hf-prompt-lookup, and hf-assistant if it has a model; none with --batch-size above 1)"""
PLOT_HELP = """draw the report: a .png or .svg file. Methods with several numbers of nodes are drawn by nodes, else all
methods by speed"""
GPU_HELP = """run the tests that need a GPU, measure passes and decoding steps there, and write this page and a JSON
next to it"""
HEAD_HELP = f"""for {HEADS}: the folder of a head trained for the model, e.g. medusa=DIR; repeatable (default, with the
default model only: its pretrained ones)"""


@dataclass(frozen=True)
class BenchOptions(Options):
    """What is measured, and how. A method's name stands for the options of its proposer (`parse_method`)."""

    model: ModelOptions
    methods: Sequence[str]
    peers: Sequence[str] = ()
    heads: Mapping[str, str] = field(default_factory=dict)  # folders by kind
    draft_model: str | None = None
    questions: Path = Path()
    limit: int | None = None
    repeats: int = 3
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 1
    threads: int | None = None
    json: Path | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace, **others: Any) -> BenchOptions:
        """The parsed options, with default methods and peers filled in and the baselines first.

        Raises ValueError for unknown methods and peers, missing models and heads, and files that cannot be written.
        """
        model, heads = ModelOptions.from_args(args), dict(args.head)
        drafts = {"draft", "hf-assistant"} if args.draft_model is not None else set()
        pretrained = {kind for kind in HEAD_PROPOSERS if model.model is None and (PRETRAINED / kind).is_dir()}
        possible = {"none", "ngram", *GROWN, "hf", "hf-prompt-lookup", *heads, *pretrained, *drafts}
        methods = _split(args.methods, [name for name in PROPOSERS if name in possible])
        peers = _split(args.peers, [name for name in PEERS if name in possible and args.batch_size == 1])
        for name in peers:
            if name not in PEERS:
                raise ValueError(f"unknown peer {name!r}; choose from {', '.join(PEERS)}")
        for name in {"draft", "hf-assistant"} & {*methods, *peers} - drafts:
            raise ValueError(f"{name} needs --draft-model, a smaller model with the vocabulary of --model")
        named = [parse_method(name) for name in methods]
        for kind in {method.options.head or method.kind for method in named} & {*HEAD_PROPOSERS}:
            ProposerOptions(kind, head=heads.get(kind)).check(model)
        if any(method.keeps_answers for method in named) and (args.repeats or cls.repeats) > 1:
            raise ValueError("methods that keep answers would draft from the answer to the same question; --repeats 1")
        if peers and args.batch_size > 1:
            raise ValueError(f"{peers[0]} answers one question at a time; leave out --peers or --batch-size")
        check_writable(args.json, "--json")
        Sampling(args.temperature)  # refuses a bad temperature
        methods, peers = [*dict.fromkeys(["none", *methods])], [*dict.fromkeys(["hf", *peers])] if peers else []
        found = {"model": model, "heads": heads, "methods": methods, "peers": peers}
        return super().from_args(args, **found, repeats=args.repeats or cls.repeats, **others)

    def describe(self, questions: Sequence[Question]) -> dict[str, Any]:
        """The settings of a report, without the name of any folder above a model."""
        draft = None
        if {"draft", "hf-assistant"} & {*self.methods, *self.peers}:
            draft = self.draft_model and _base(self.draft_model)
        return {
            **{key: value for key, value in vars(self).items() if key not in ("threads", "json")},
            "model": name_model(self.model),
            "draft_model": draft,
            "heads": {kind: f"{_base(folder)} {_digest(folder)}" for kind, folder in self.heads.items()},
            "questions": self.questions.name,
            "questions_sha256": digest_questions(questions),
            "accelerate": self.model.accelerate,
        }


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `BenchOptions`, `--passes`, `--from` and `--plot`."""
    source = parser.add_mutually_exclusive_group(required=True).add_argument
    source("--questions", type=Path, metavar="FILE", help="JSONL with question_id, category and turns")
    source("--passes", action="store_true", help="measure forward passes over 1 to 64 nodes instead of methods")
    source("--start", action="store_true", help="measure how long a model takes to start, and its memory")
    source("--gpu-report", type=Path, metavar="FILE.md", help=GPU_HELP)
    source("--from", dest="report", type=Path, metavar="JSON", help="show an earlier report; run nothing")
    add, whole, head = parser.add_argument, at_least(1), named_value("KIND=DIR", HEAD_PROPOSERS)
    add("--methods", help=METHODS_HELP)
    add("--peers", help=PEERS_HELP)
    add("--limit", type=whole, metavar="N", help="number of questions, the same from each of Spec-Bench's tasks")
    add("--repeats", type=whole, metavar="N", help=f"default: {BenchOptions.repeats}; otherwise: {PASS_ROUNDS}")
    add("--max-new-tokens", type=whole, default=256, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy decoding")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--batch-size", type=whole, default=1, metavar="N", help="questions of a category at a time (default: 1)")
    add("--threads", type=whole, metavar="N", help="CPU threads (default: torch's choice)")
    add("--json", type=Path, metavar="FILE", help="write the report; continue it if it was interrupted")
    add("--plot", type=Path, metavar="FILE", help=PLOT_HELP)
    add_model_options(parser)
    add("--draft-model", help=f"for draft and hf-assistant: {DRAFT_MODEL_HELP}")
    add("--head", action="append", default=[], type=head, metavar="KIND=DIR", help=HEAD_HELP)


def name_model(options: ModelOptions) -> str:
    """The model's name without any folder above it."""
    return _base(options.model) if options.model else DEFAULT_MODEL


def _split(names: str | None, default: list[str]) -> list[str]:
    return default if names is None else [name.strip() for name in names.split(",") if name.strip()]


def _base(name: str) -> str:
    """A folder's last name; a hub id as it is."""
    return Path(name).resolve().name if Path(name).exists() else name


def _digest(folder: str) -> str:
    """Changes with the content of a head's folder."""
    files = sorted(file for file in Path(folder).glob("*") if file.suffix in (".json", ".safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
