"""Measure speed as Spec-Bench does: plain decoding, proposers, Hugging Face's generate; or passes, starts, a GPU."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, installed or not
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the slow imports ends without a traceback

import torch
from tqdm import tqdm

from scripts.benchmark.files import Records, describe_machine, find_commit, read_report, write_report
from scripts.benchmark.measurement import measure_group, open_conversations, warm_up
from scripts.benchmark.method_names import parse_method
from scripts.benchmark.methods import make_methods
from scripts.benchmark.node_plot import draw_nodes, find_families
from scripts.benchmark.options import BenchOptions, add_bench_options
from scripts.benchmark.pass_options import PassOptions, add_pass_options, refuse_options_of_others
from scripts.benchmark.pass_report import draw_passes, format_passes
from scripts.benchmark.passes import run_passes
from scripts.benchmark.plot import draw_plot
from scripts.benchmark.questions import form_groups, load_questions, take_evenly
from scripts.benchmark.rows import make_rows
from scripts.benchmark.starts import StartOptions, run_starts
from scripts.benchmark.tables import format_starts, format_tables
from scripts.gpu_report.page import format_page
from scripts.gpu_report.report import GpuOptions, run_gpu_report
from scripts.shared.command import Parser, check_plot, failing_clearly
from scripts.shared.options import load_target
from scripts.shared.prompts import encode_turn
from training.rendering import Renderer

EPILOG = """\
All methods answer one question before the next one is asked, in a changing order. Times are medians over the repeats
and include the prompt. Later turns follow plain decoding's answers, so that all methods see the same prompt. Proposers
start anew with each question; merged-warm keeps its store of answers alone. Nodes of a tree include its root, and the
column "nodes" has the draft tokens of a step.

Speeds are the sum of tokens over the sum of seconds; Spec-Bench's mean over questions is in the JSON too. The 95 %
intervals of their ratios are bootstrapped over questions. tau: tokens per forward pass of the model. identical: share
of answers with the tokens of plain decoding, and the largest gap between the model's two highest logits where answers
differ. loops: share of answers that ended in a loop, their last 60 tokens repeating with a period under 20. Trimmed,
an answer ends where its loop repeats the first token. Accepted by source: the most confident source of a token counts.

The JSON has settings, machine, rows (one per method and category; mt_bench, second_turns and all are sums), differences
and the records of single questions. --from computes the rows again from the records. During a run, FILE.partial.jsonl
has the finished questions; the same command continues after them.

With --passes: the time of one forward pass of the model over 1 to 64 nodes, in float32 and bfloat16 (or --dtype), with
256 and 4000 tokens of context, in batches of 1 and 4. Every round times each of them once, in random order, right after
a pass of the same kind that is not timed. Times are medians over the rounds. llama-bench runs once in every round.

With --start: seconds and memory of loading the model with transformers alone, of the first start on a machine, with
nothing compiled or measured yet, and of a later one, in turns and each in a process of its own. Loaded: the model is
there. Ready: it is warmed up and has chosen its first token. The time and memory of imports are not included. Peak: all
resident memory, with the mapped file of the weights. Private: what is held in the end, without mapped files. Medians.

With --gpu-report, for the model and for the shape of an 8B model with random weights, in bfloat16 (or --dtype): passes
over 1 to 64 nodes with 256, 4096 and 32768 tokens of context in batches of 1, 4 and 16, next to the time of reading the
weights and the KV cache once; tokens per second; launches, copies, waits and gaps of a step. With --device cpu a tiny
shape shows that the command works.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="bench.py", description=__doc__, epilog=EPILOG)
    add_bench_options(parser)
    add_pass_options(parser)
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        refuse_options_of_others(args, parser)
        check_plot(args.plot)
        if args.gpu_report is not None:
            report = run_gpu_report(GpuOptions.from_args(args))
            print(format_page(report))
            return
        if args.report is not None:
            report = read_report(args.report)
        elif args.start:
            report = run_starts(StartOptions.from_args(args))
        else:
            report = run_passes(PassOptions.from_args(args)) if args.passes else run_bench(BenchOptions.from_args(args))
        if "starts" in report:
            print(format_starts(report))
            if args.plot is not None:
                raise ValueError("a report of starts has no picture; leave out --plot")
            return
        print(format_passes(report) if "passes" in report else format_tables(report["rows"]))
        if args.plot is not None:
            draw(report, args.plot)


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw passes, methods by their numbers of nodes, or all methods by speed."""
    if "passes" in report:
        draw_passes(report, path)
    elif find_families(report):
        draw_nodes(report, path)
    else:
        draw_plot(report, path)


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
    if records.found and any(parse_method(name).keeps_answers for name in options.methods):
        raise ValueError(f"{records.path} has lost the answers that were kept to draft from; remove it to start again")
    methods = make_methods(options, target)
    groups = form_groups(questions, options.batch_size)
    records.begin()
    done = len(records.found)
    finished = sum(map(len, groups[:done]))
    if 0 < done < len(groups):
        print(f"bench.py: continuing after {finished} of {len(questions)} questions", file=sys.stderr)
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
