"""The options of `draftless bench`: which methods to measure on which questions, or which passes to time."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode import Sampling
from decode.models.loading import DTYPES
from scripts.benchmark.methods import METHODS_HELP, NamedMethod, parse_methods
from scripts.benchmark.questions import Question, digest_questions
from scripts.shared.command import at_least, check_writable, named_value
from scripts.shared.options import ModelOptions, Options, add_model_options

DEFAULT_MODEL, DEFAULT_METHODS = "SmolLM2-135M-Instruct", "none,hf,ngram,merged,auto"
DEFAULT_DTYPES, ROUNDS = ("float32", "bfloat16"), 15
METHOD_OPTIONS = ("methods", "limit", "max_new_tokens", "temperature", "seed", "batch_size")
PASS_OPTIONS = ("llama_bench", "gguf")
BUILT_IN = Path(__file__).with_name("questions.jsonl")  # a first look; for a measurement take more
QUESTIONS_HELP = "JSONL with question_id, category and turns, as Spec-Bench's (default: 12 short ones of six tasks)"
GGUF_HELP = "the model for llama-bench in a dtype that is measured, e.g. float32=model-f32.gguf; repeatable"


@dataclass(frozen=True)
class BenchOptions(Options):
    """What is measured, and how."""

    model: ModelOptions
    methods: Sequence[NamedMethod]
    questions: Path = BUILT_IN
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
        """The parsed options. Raises ValueError for what cannot be measured, before anything is loaded."""
        model, methods = ModelOptions.from_args(args), parse_methods(args.methods or DEFAULT_METHODS)
        repeats = args.repeats or cls.repeats
        for method in methods:
            method.check(model)
            if method.is_peer and args.batch_size > 1:
                raise ValueError(f"{method.text} answers one question at a time; leave it out, or --batch-size")
            if method.warm and repeats > 1:
                raise ValueError(f"{method.text} would draft from its answer to the same question; give --repeats 1")
        check_writable(args.json, "--json")
        Sampling(args.temperature)  # refuses a bad temperature
        return super().from_args(args, model=model, methods=methods, repeats=repeats, **others)

    def describe(self, questions: Sequence[Question]) -> dict[str, Any]:
        """The settings of a report, without the name of any folder above a model."""
        return {
            **{key: value for key, value in vars(self).items() if key not in ("threads", "json")},
            "model": name_model(self.model),
            "methods": [method.text for method in self.methods],
            "questions": self.questions.name,
            "questions_sha256": digest_questions(questions),
            "accelerate": self.model.accelerate,
        }


@dataclass(frozen=True)
class PassOptions(Options):
    """Whose forward passes are timed, and how often."""

    model: ModelOptions
    repeats: int = ROUNDS
    threads: int | None = None
    json: Path | None = None
    llama_bench: str | None = None
    gguf: Mapping[str, str] = field(default_factory=dict)  # files by dtype

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The number formats to measure."""
        return DEFAULT_DTYPES if self.model.dtype is None else (self.model.dtype,)

    @classmethod
    def from_args(cls, args: argparse.Namespace, **others: Any) -> PassOptions:
        """The parsed options. Raises ValueError for files that are missing or cannot be written."""
        found = {"model": ModelOptions.from_args(args), "gguf": dict(args.gguf), "repeats": args.repeats or cls.repeats}
        options = super().from_args(args, **found, **others)
        check_writable(options.json, "--json")
        if (options.llama_bench is None) == bool(options.gguf):
            raise ValueError("--llama-bench and --gguf need each other: the program and a model for it")
        if options.llama_bench is not None and shutil.which(options.llama_bench) is None:
            raise ValueError(f"--llama-bench {options.llama_bench} is not a program; give llama.cpp's llama-bench")
        for dtype, file in options.gguf.items():
            if dtype not in options.dtypes or not Path(file).is_file():
                raise ValueError(f"--gguf {dtype}={file}: a file for one of {', '.join(options.dtypes)}")
        return options


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add all options: what to measure, methods, passes, the report and the model."""
    source = parser.add_mutually_exclusive_group().add_argument
    source("--questions", type=Path, default=BUILT_IN, metavar="FILE", help=QUESTIONS_HELP)
    source("--passes", action="store_true", help="time forward passes over 1 to 64 nodes instead of methods")
    source("--from", dest="report", type=Path, metavar="JSON", help="show an earlier report; run nothing")
    add, whole = parser.add_argument, at_least(1)
    add("--methods", help=f"{METHODS_HELP} (default: {DEFAULT_METHODS}; with --from: all)")
    add("--limit", type=whole, metavar="N", help="number of questions, the same from each of Spec-Bench's tasks")
    add("--repeats", type=whole, metavar="N", help=f"default: {BenchOptions.repeats}; passes: {ROUNDS}")
    add("--max-new-tokens", type=whole, default=256, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy decoding")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--batch-size", type=whole, default=1, metavar="N", help="questions of a category at a time (default: 1)")
    add("--threads", type=whole, metavar="N", help="CPU threads (default: torch's choice)")
    add("--json", type=Path, metavar="FILE", help="write the report; continue it if it was interrupted")
    add("--plot", type=Path, metavar="FILE", help="draw the first table: a .png or .svg file")
    model = named_value("DTYPE=FILE", DTYPES)
    add("--llama-bench", metavar="PROGRAM", help="with --passes: compare with llama.cpp's llama-bench (needs --gguf)")
    add("--gguf", action="append", default=[], type=model, metavar="DTYPE=FILE", help=GGUF_HELP)
    add_model_options(parser)


def refuse_options_of_others(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise ValueError for options that the chosen measurement does not have."""
    others, user = (METHOD_OPTIONS, "--questions") if args.passes else (PASS_OPTIONS, "--passes")
    for name in others:
        if getattr(args, name) != parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} is for {user}")


def name_model(options: ModelOptions) -> str:
    """A folder's last name, a hub id as it is, or the default model."""
    name = options.model
    return DEFAULT_MODEL if name is None else Path(name).resolve().name if Path(name).exists() else name
