"""The options of bench.py --passes."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode.models.loading import DTYPES
from scripts.benchmark.options import PASS_ROUNDS
from scripts.shared.command import check_writable, named_value
from scripts.shared.options import ModelOptions, Options

DEFAULT_DTYPES = ("float32", "bfloat16")
METHOD_OPTIONS = (
    *("methods", "peers", "limit", "max_new_tokens", "temperature", "seed", "batch_size"),
    *("draft_model", "head"),
)
PASS_OPTIONS = ("llama_bench", "gguf")
REPORT_OPTIONS = ("threads", "json", "plot")
GGUF_HELP = "the model for llama-bench in a dtype that is measured, e.g. float32=model-f32.gguf; repeatable"


@dataclass(frozen=True)
class PassOptions(Options):
    """Whose forward passes are timed, and how often."""

    model: ModelOptions
    repeats: int = PASS_ROUNDS
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
            if dtype not in options.dtypes:
                raise ValueError(f"--gguf {dtype}={file}: {dtype} is not measured, only {', '.join(options.dtypes)}")
            if not Path(file).is_file():
                raise ValueError(f"--gguf {dtype}={file}: there is no such file")
        return options


def add_pass_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only --passes has."""
    add, model = parser.add_argument_group("with --passes").add_argument, named_value("DTYPE=FILE", DTYPES)
    add("--llama-bench", metavar="PROGRAM", help="compare with llama.cpp: its program llama-bench (needs --gguf)")
    add("--gguf", action="append", default=[], type=model, metavar="DTYPE=FILE", help=GGUF_HELP)


def refuse_options_of_others(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise ValueError for options that the chosen measurement does not have."""
    if args.gpu_report is not None:
        refused = [(name, "others, not for --gpu-report") for name in (*METHOD_OPTIONS, *PASS_OPTIONS, *REPORT_OPTIONS)]
    else:
        refused = [] if args.passes else [(name, "--passes") for name in PASS_OPTIONS]
    if args.passes or args.start:
        mode = "--passes" if args.passes else "--start"
        refused += [(name, f"--questions, not for {mode}") for name in METHOD_OPTIONS]
    refused += [("plot", "--questions, --passes and --from")] * args.start
    for name, why in refused:
        if getattr(args, name) != parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} is for {why}")
