"""Measure speed as Spec-Bench does: plain decoding, proposers and Hugging Face's generate; or passes; or a device."""

from __future__ import annotations

import hashlib
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from decode import Sampling
from decode.models.loading import DTYPES
from proposers.load import check_options
from scripts.benchmark import files, measurement
from scripts.benchmark.first_hour import run_first_hour
from scripts.benchmark.methods import METHODS_HELP, PEERS, check_peer, make_methods, parse_methods
from scripts.benchmark.passes import ROUNDS, format_passes, run_passes
from scripts.benchmark.plot import describe, draw_methods, draw_passes
from scripts.benchmark.rows import format_tables, make_rows
from scripts.shared.command import (
    Parser,
    at_least,
    check_output_folder,
    check_plot,
    check_writable,
    failing_clearly,
    named_value,
)
from scripts.shared.options import ModelOptions, add_model_options, load_target
from scripts.shared.prompts import encode_turn
from training.rendering import Renderer

DEFAULT_METHODS, REPEATS = "none,hf,ngram,merged,auto", 3
METHOD_OPTIONS = ("methods", "limit", "max_new_tokens", "temperature", "seed", "batch_size")
PASS_OPTIONS = ("llama_bench", "gguf")
CHOSEN_BY_PART = ("methods", "temperature", "seed", "batch_size", "json", "plot", *PASS_OPTIONS)  # of the first hour
BUILT_IN = Path(__file__).parent / "benchmark" / "questions.jsonl"  # a first look; for a measurement take more
QUESTIONS_HELP = """a .jsonl file with "prompt", "turns", "messages" or "conversations" in each line
(docs/training.md has the formats), and "category" and "question_id" if you like, as Spec-Bench's; any other file, or -
for standard input, is one plain-text prompt (default: 12 short questions of six tasks)"""
GGUF, GGUF_HELP = (
    "DTYPE=FILE",
    "the model for llama-bench in a dtype that is measured, e.g. float32=model-f32.gguf; repeatable",
)
EPILOG = """\
All methods answer one question before the next one is asked, in a changing order. Times are medians over the repeats
and include the prompt. Later turns follow plain decoding's answers, so that all methods see the same prompt. Proposers
start anew with each question; a method with warm=true keeps its store of answers alone. Nodes of a tree include its
root, and the column "nodes" has the draft tokens of a step.

Speeds are all tokens over all seconds; the 95 % intervals of their ratios are bootstrapped over questions. tau: tokens
per forward pass of the model. identical: share of answers with the tokens of plain decoding, and the largest gap
between the model's two highest logits where answers differ. loops: share of answers whose last 60 tokens repeat with a
period under 20; trimmed, they end where the loop repeats its first token.

The JSON has settings, machine, rows (one per method and task; all is their sum), differences and the records of single
questions, of which --from computes the rows again. During a run, FILE.partial has the finished questions; the same
command continues after them.

With --passes: the time of a forward pass over 1 to 64 nodes, in float32 and bfloat16 (or --dtype), after 256 and 4000
tokens (or what the model has room for), in batches of 1 and 4. Every round times each of them once, in random order,
right after an untimed pass of the same kind; times are medians. llama-bench runs once in every round. It computes the
logits of a pass's last token, Draftless those of all nodes.

With --first-hour: what to run first on a new GPU (--device, cuda by default): the tests of a checkout, steps at the
sizes of an 8B Llama with random weights, passes and methods. FOLDER gets page.md, report.json and the reports of
passes and methods. Each part has a time limit and a process of its own; one that fails is a line of the page.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        check_output_folder(args.first_hour, "--first-hour")
        if args.first_hour is not None:
            for name in CHOSEN_BY_PART:
                if getattr(args, name) != parser.get_default(name):
                    raise ValueError(f"--{name.replace('_', '-')} is not for --first-hour, whose parts have their own")
            print(run_first_hour(args))
            return
        for name in METHOD_OPTIONS if args.passes else PASS_OPTIONS:
            if getattr(args, name) != parser.get_default(name):
                raise ValueError(f"--{name.replace('_', '-')} is for {'--questions' if args.passes else '--passes'}")
        check_plot(args.plot)
        check_writable(args.json, "--json")
        partial = args.json and args.json.with_name(f"{args.json.name}.partial")
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        if args.report is not None:
            report = read_report(args.report, args.methods)
        else:
            report = run_passes(args) if args.passes else run_bench(args, partial)
        if args.json is not None:
            files.write_report(args.json, report)
            partial.unlink(missing_ok=True)
        print(format_passes(report) if "passes" in report else format_tables(report["rows"]))
        if args.plot is not None:
            (draw_passes if "passes" in report else draw_methods)(report, args.plot)


def make_parser() -> Parser:
    parser = Parser(prog="draftless bench", description=__doc__, epilog=EPILOG)
    source = parser.add_mutually_exclusive_group().add_argument
    source("--questions", type=Path, default=BUILT_IN, metavar="FILE", help=QUESTIONS_HELP)
    source("--passes", action="store_true", help="time forward passes over 1 to 64 nodes instead of methods")
    source("--first-hour", type=Path, metavar="FOLDER", help="test and measure a GPU; go on if it was interrupted")
    source("--from", dest="report", type=Path, metavar="JSON", help="show an earlier report; run nothing")
    add, whole = parser.add_argument, at_least(1)
    add("--methods", help=f"{METHODS_HELP} (default: {DEFAULT_METHODS}; with --from: all)")
    add("--limit", type=whole, metavar="N", help="number of questions, the same from each of Spec-Bench's tasks")
    add("--repeats", type=whole, metavar="N", help=f"default: {REPEATS}; passes: {ROUNDS}")
    add("--max-new-tokens", type=whole, default=256, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy decoding")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--batch-size", type=whole, default=1, metavar="N", help="questions of a category at a time (default: 1)")
    add("--threads", type=whole, metavar="N", help="CPU threads (default: torch's choice)")
    add("--json", type=Path, metavar="FILE", help="write the report; continue it if it was interrupted")
    add("--plot", type=Path, metavar="FILE", help="draw the first table: a .png or .svg file")
    add("--llama-bench", metavar="PROGRAM", help="with --passes: compare with llama.cpp's llama-bench (needs --gguf)")
    add("--gguf", action="append", default=[], type=named_value(GGUF, DTYPES), metavar=GGUF, help=GGUF_HELP)
    add_model_options(parser)
    return parser


def run_bench(args: Namespace, partial: Path | None) -> dict[str, Any]:
    """Measure every method on every question and return the report. Raises ValueError for what cannot be measured.

    partial: a file that keeps the finished questions, also those of an interrupted run.
    """
    model, named = (
        ModelOptions.from_args(args),
        parse_methods(DEFAULT_METHODS if args.methods is None else args.methods),
    )
    args.repeats = args.repeats or REPEATS
    for method in named:
        if method.name in PEERS:
            check_peer(method)
        else:
            check_options(method.name, method.options, pretrained=model.model is None)
        if method.name in PEERS and args.batch_size > 1:
            raise ValueError(f"{method.text} answers one question at a time; leave it out, or --batch-size")
        if method.warm and method.name not in ("merged", "auto"):
            raise ValueError(f"{method.text}: warm is for merged and auto, which draft from earlier answers")
        if "store" in method.options:
            raise ValueError(f"{method.text}: a store is not read here; warm=true keeps answers between questions")
        if method.warm and args.repeats > 1:
            raise ValueError(f"{method.text} would draft from its answer to the same question; give --repeats 1")
    Sampling(args.temperature)  # refuses a bad temperature
    questions = measurement.take_evenly(measurement.load_questions(args.questions), args.limit)
    groups = measurement.form_groups(questions, args.batch_size)
    target = load_target(model)
    # Finds questions that do not fit before the first is asked.
    encode_turn(measurement.open_conversations(questions), 0, target, Renderer(target.tokenizer))
    settings = {name: getattr(args, name) for name in ("accelerate", "repeats", *METHOD_OPTIONS[1:])}
    settings |= {"model": files.name_model(model), "methods": [method.text for method in named]}
    settings |= {"questions": args.questions.name, "commit": files.find_commit()}
    asked = repr([*questions, *(each.row for each in questions if each.row is not None)])
    settings["questions_sha256"] = hashlib.sha256(asked.encode()).hexdigest()[:16]
    machine = {**files.describe_machine(target.device), "dtype": str(target.dtype).removeprefix("torch.")}
    machine["weights"] = files.describe_weights(target)
    setup = {"settings": settings, "machine": {**machine, "compiled": target.compiled}}
    records = files.read_partial(partial, setup) if partial is not None else []
    if records and any(method.warm for method in named):
        raise ValueError(f"{partial} has lost the answers that were kept to draft from; remove it to start again")
    methods = make_methods(named, target, model, args.temperature)
    done, total = len(records), len(groups)
    if done:
        print(f"draftless bench: continuing after {done} of {total} groups of questions", file=sys.stderr)
    for record in measurement.measure_groups(methods, groups, done, target, args):
        records.append(record)
        if partial is not None:
            files.write_report(partial, {**setup, "records": records})
    differences = [difference for record in records for difference in record.pop("differences")]
    rows = make_rows(records, differences, list(methods))
    return {**setup, "rows": rows, "differences": differences, "records": records}


def read_report(path: Path, methods: str | None) -> dict[str, Any]:
    """An earlier report, with its rows computed again from its records.

    methods: those to show, as in `parse_methods`; None shows all. Raises ValueError for a file that is not a report, or
    has no such method.
    """
    found = []
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if "passes" in report:
            format_passes(report)
        else:
            found = [*report["settings"]["methods"], *report["settings"].get("peers", ())]
            report["rows"] = make_rows(report["records"], report["differences"], found)
        describe(report)
    except json.JSONDecodeError as error:
        where = f"{error.msg}, line {error.lineno}, column {error.colno}"
        raise ValueError(f"{path} is not a report of draftless bench: it is not JSON ({where})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a report of draftless bench: it is no text in UTF-8") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is not a report of draftless bench, which writes them with --json") from error
    if methods is not None:
        chosen = [method.text for method in parse_methods(methods)]
        if unknown := [name for name in chosen if name not in found]:
            raise ValueError(f"{path} has no method {', '.join(unknown)}; it has {', '.join(found)}")
        report["rows"] = [row for row in report["rows"] if row["method"] in chosen]
    return report


if __name__ == "__main__":
    main()
