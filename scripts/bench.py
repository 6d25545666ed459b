"""Measure speed as Spec-Bench does: plain decoding, proposers and Hugging Face's generate; or forward passes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from scripts.benchmark.files import Records, describe_machine, find_commit, read_report, write_report
from scripts.benchmark.measurement import measure_group, open_conversations, warm_up
from scripts.benchmark.methods import make_methods, parse_methods
from scripts.benchmark.options import BenchOptions, PassOptions, add_bench_options, refuse_options_of_others
from scripts.benchmark.passes import format_passes, run_passes
from scripts.benchmark.plot import draw_report
from scripts.benchmark.questions import form_groups, load_questions, take_evenly
from scripts.benchmark.rows import make_rows
from scripts.benchmark.tables import format_tables
from scripts.shared.command import Parser, check_plot, failing_clearly
from scripts.shared.options import load_target
from scripts.shared.prompts import encode_turn
from training.rendering import Renderer

EPILOG = """\
All methods answer one question before the next one is asked, in a changing order. Times are medians over the repeats
and include the prompt. Later turns follow plain decoding's answers, so that all methods see the same prompt. Proposers
start anew with each question; a method with warm=true keeps its store of answers alone. Nodes of a tree include its
root, and the column "nodes" has the draft tokens of a step.

Speeds are the sum of tokens over the sum of seconds. The 95 % intervals of their ratios are bootstrapped over
questions. tau: tokens per forward pass of the model. identical: share of answers with the tokens of plain decoding, and
the largest gap between the model's two highest logits where answers differ. loops: share of answers that ended in a
loop, their last 60 tokens repeating with a period under 20. Trimmed, an answer ends where its loop repeats the first
token. Accepted by source: the most confident source of a token counts.

The JSON has settings, machine, rows (one per method and task; all is their sum), differences and the records of single
questions. --from computes the rows again from the records. During a run, FILE.partial.jsonl has the finished questions;
the same command continues after them.

With --passes: the time of one forward pass of the model over 1 to 64 nodes, in float32 and bfloat16 (or --dtype), with
256 and 4000 tokens of context, in batches of 1 and 4. Every round times each of them once, in random order, right after
a pass of the same kind that is not timed. Times are medians over the rounds. llama-bench runs once in every round.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="draftless bench", description=__doc__, epilog=EPILOG)
    add_bench_options(parser)
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        refuse_options_of_others(args, parser)
        check_plot(args.plot)
        if args.report is not None:
            named = args.methods and [method.text for method in parse_methods(args.methods)]
            report = read_report(args.report, named)
        else:
            report = run_passes(PassOptions.from_args(args)) if args.passes else run_bench(BenchOptions.from_args(args))
        print(format_passes(report) if "passes" in report else format_tables(report["rows"]))
        if args.plot is not None:
            draw_report(report, args.plot)


def run_bench(options: BenchOptions) -> dict[str, Any]:
    """Measure everything and return the report, also written to `options.json` if given."""
    questions = take_evenly(load_questions(options.questions), options.limit)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    target = load_target(options.model)
    # Finds questions that do not fit before the first is asked.
    encode_turn(open_conversations(questions), 0, target, Renderer(target.tokenizer))
    machine = {"dtype": str(target.dtype).removeprefix("torch."), "compiled": target.compiled}
    setup = {
        "settings": {**options.describe(questions), "commit": find_commit()},
        "machine": {**describe_machine(target.device), **machine},
    }
    records = Records(options.json and options.json.with_name(options.json.name + ".partial.jsonl"), setup)
    if records.found and any(method.warm for method in options.methods):
        raise ValueError(f"{records.path} has lost the answers that were kept to draft from; remove it to start again")
    methods = make_methods(options.methods, target, options.model, options.temperature)
    groups = form_groups(questions, options.batch_size)
    records.begin()
    done = len(records.found)
    finished = sum(map(len, groups[:done]))
    if 0 < done < len(groups):
        print(f"draftless bench: continuing after {finished} of {len(questions)} questions", file=sys.stderr)
    with tqdm(total=len(questions), initial=finished, unit="question", disable=None) as bar:
        for number, group in enumerate(groups[done:], start=done):
            if number == done:
                bar.set_postfix_str("warming up")
                warm_up(methods, max(groups, key=len), target, options)
            bar.set_postfix_str(group[0].category)
            records.append(measure_group(methods, group, number, target, options))
            bar.update(len(group))
    differences = [difference for record in records.found for difference in record.pop("differences")]
    rows = make_rows(records.found, differences, list(methods))
    report = {**setup, "rows": rows, "differences": differences, "records": records.found}
    if options.json is not None:
        write_report(options.json, report)
    if records.path is not None:
        records.path.unlink()
    return report


if __name__ == "__main__":
    main()
