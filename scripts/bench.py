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
from draftless_commands.benchmark import files
from draftless_commands.benchmark.first_hour import run_first_hour
from draftless_commands.benchmark.measurement import measure_groups
from draftless_commands.benchmark.methods import METHODS_HELP, check_method, make_methods, parse_methods
from draftless_commands.benchmark.passes import ROUNDS, format_passes, run_passes
from draftless_commands.benchmark.plot import describe, draw_methods, draw_passes
from draftless_commands.benchmark.questions import form_groups, load_questions, take_evenly
from draftless_commands.benchmark.rows import format_tables, make_rows
from draftless_commands.shared.command import (
    Parser,
    at_least,
    check_output_folder,
    check_plot,
    check_writable,
    failing_clearly,
)
from draftless_commands.shared.options import ModelOptions, add_model_options, list_heads, load_target
from draftless_commands.shared.prompts import TEMPLATE_OPTION, encode_turn
from training.rendering import Renderer

JSON_HELP = "write the report; continue it if it was interrupted (not with --passes)"
DEFAULT_METHODS, REPEATS = "none,hf,ngram,merged,auto", 3
METHOD_OPTIONS = ("limit", "max_new_tokens", "temperature", "seed", "batch_size")
# Options that what is measured does not take. The parts of the first hour have their own.
TIMED = "llama_bench", "gguf"
REFUSED = {
    "questions": TIMED,
    "passes": ("methods", "template_option", *METHOD_OPTIONS),
    "from": (
        *("template_option", "repeats", "threads", *METHOD_OPTIONS, *TIMED),
        *("model", "dtype", "device", "device_map", "accelerate"),
    ),
    "first_hour": ("methods", "template_option", "temperature", "seed", "batch_size", "json", "plot", *TIMED),
}
BUILT_IN = Path(__file__).parent / "benchmark" / "questions.jsonl"  # a first look; for a measurement take more
QUESTIONS_HELP = """a .jsonl file with "prompt", "question", "turns", "messages" or "conversations" in each line
(docs/training.md has the formats), and "category" and "question_id" if you like, as those of Spec-Bench, MT-Bench,
HumanEval and GSM8K; a .parquet file of such rows, as SPEED-Bench's prepare_data.py writes; any other file, or - for
standard input, is one plain-text prompt (default: 12 short questions of six tasks)"""
EPILOG = """\
All methods answer one question before the next one is asked, in a changing order. Times are medians over the repeats
and include the prompt. Later turns follow plain decoding's answers, so that all methods see the same prompt. Proposers
start anew with each question; a method with warm=true keeps its store of answers alone. Nodes of a tree include its
root, and the column "nodes" has the draft tokens of a step.

Speeds are all tokens over all seconds; the 95 % intervals of their ratios are bootstrapped over questions (with
--batch-size, over groups of them). tau: tokens per forward pass of the model; by question: the mean of the questions'
taus, as SPEED-Bench has it; by pass: without the prompts' passes, as is what follows: the share of passes that accepted
a first, second, ... draft token. If answers think, thinking is inside of <think>...</think>, answer outside. identical:
share of answers with the tokens of plain decoding, and the largest gap between the model's two highest logits where
answers differ. loops: share of answers whose last 60 tokens repeat with a period under 20; trimmed, they end where the
loop repeats its first token.

hf-compiled compiles the forward pass for a static cache, untimed, once for each power of two slots. Another program is
a class with version, load(model, tokenizer) and answer(prompts, max_new_tokens); docs/measure/peers.py has one. What
it raises stands below the tables.

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
        given = {"passes": args.passes, "from": args.report, "first_hour": args.first_hour}
        measured = next((name for name, value in given.items() if value), "questions")
        for name in REFUSED[measured]:
            if getattr(args, name) != parser.get_default(name):
                option, what = (each.replace("_", "-") for each in (name, measured))
                raise ValueError(f"--{option} is not for --{what}")
        check_output_folder(args.first_hour, "--first-hour")
        if args.first_hour is not None:
            print(run_first_hour(args))
            return
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
            if args.report is None and not args.passes:  # else it is another run's
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
    add("--methods", help=f"{METHODS_HELP} (default: {DEFAULT_METHODS}; in batches without hf; --from: all)")
    add("--limit", type=whole, metavar="N", help="number of questions, the same from each of Spec-Bench's tasks")
    add("--repeats", type=whole, metavar="N", help=f"default: {REPEATS}; passes: {ROUNDS}")
    add("--max-new-tokens", type=whole, default=256, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy decoding")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--batch-size", type=whole, default=1, metavar="N", help="questions of a category at a time (default: 1)")
    add("--template-option", **TEMPLATE_OPTION)
    add("--threads", type=whole, metavar="N", help="CPU threads (default: torch's choice)")
    add("--json", type=Path, metavar="FILE", help=JSON_HELP)
    add("--plot", type=Path, metavar="FILE", help="draw the first table: a .png or .svg file")
    add("--llama-bench", metavar="PROGRAM", help="with --passes and --dtype: compare with llama.cpp's llama-bench")
    add("--gguf", metavar="FILE", help="the model for llama-bench")
    add_model_options(parser)
    return parser


def run_bench(args: Namespace, partial: Path | None, chat_template: str | None = None) -> dict[str, Any]:
    """Measure every method on every question and return the report. Raises ValueError for what cannot be measured.

    partial: a file that keeps the finished questions, also those of an interrupted run. chat_template: for a tokenizer
    that has none.
    """
    methods = DEFAULT_METHODS if args.batch_size == 1 else DEFAULT_METHODS.replace("hf,", "")  # it takes no batches
    model, named = ModelOptions.from_args(args), parse_methods(args.methods or methods)
    args.repeats = args.repeats or REPEATS
    for method in named:
        check_method(method, pretrained=model.may_be_default, batch_size=args.batch_size, repeats=args.repeats)
    model = model.for_heads(each for method in named for each in list_heads(method.name, method.options.get("head")))
    Sampling(args.temperature)  # refuses a bad temperature
    questions = take_evenly(load_questions(args.questions), args.limit)
    options = dict(args.template_option or ())
    for question in questions:
        question.conversation.options = options | question.conversation.options
    groups, conversations = form_groups(questions, args.batch_size), [each.conversation for each in questions]
    target = load_target(model)
    if target.tokenizer.chat_template is None:
        target.tokenizer.chat_template = chat_template
    encode_turn(conversations, 0, target, Renderer(target.tokenizer))  # finds those that do not fit before any is asked
    settings = {name: getattr(args, name) for name in ("accelerate", "repeats", *METHOD_OPTIONS)}
    settings |= {"model": model.name, "methods": [method.text for method in named]}
    settings |= {"questions": args.questions.name, "template_options": options, "commit": files.find_commit()}
    asked = repr([(each.id, each.category, each.conversation) for each in questions])
    settings["questions_sha256"] = hashlib.sha256(asked.encode()).hexdigest()[:16]
    dtype = model.dtype or str(target.dtype).removeprefix("torch.")  # fixed16 computes in float32 otherwise
    machine = {**files.describe_machine(target.device), "dtype": dtype}
    machine["weights"] = files.describe_weights(target)
    setup = {"settings": settings, "machine": {**machine, "compiled": target.compiled}}
    records = files.read_begun(partial, setup, "records") if partial is not None else []
    if records and any(method.warm for method in named):
        raise ValueError(f"{partial} has lost the answers that were kept to draft from; remove it to start again")
    methods = make_methods(named, target, model, args.temperature)
    done, total = len(records), len(groups)
    if done:
        print(f"draftless bench: continuing after {done} of {total} groups of questions", file=sys.stderr)
    for record in measure_groups(methods, groups, done, target, args):
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
