"""Measure speed as Spec-Bench does: the project's loop with each proposer, plain, and Hugging Face's own generate."""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this runs as a file, installed or not
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds; Ctrl-C ends them without a traceback

import torch
from tqdm import tqdm

from decode import Sampling, Target
from heads import PRETRAINED
from proposers import HEAD_PROPOSERS, PROPOSERS
from proposers.load import EAGLES
from scripts.benchmark.conversation import Plan, check_prompts, measure_group, warm_up
from scripts.benchmark.files import Records, check_writable, describe_machine, read_report, write_report
from scripts.benchmark.methods import PEERS, Method
from scripts.benchmark.models import load_ours, make_loops, make_peers, split_method
from scripts.benchmark.plot import check_plot, draw_plot
from scripts.benchmark.questions import Question, digest_questions, form_groups, load_questions, take_evenly
from scripts.benchmark.rows import format_tables, make_rows
from scripts.options import (
    DRAFT_LAYERS,
    Parser,
    add_model_options,
    at_least,
    check_devices,
    failing_clearly,
    find_head,
)

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
EPILOG = """\
All methods answer one question before the next is asked, in an order that changes; times are medians over the repeats
and include the prompt. A later turn is asked after the plain loop's answers, so that all methods see the same prompt.
A proposer knows nothing of other questions. Speeds are all tokens by all time; Spec-Bench's own, means of the speeds
of single questions, are beside them in the JSON. tau: new tokens a forward pass of the model. identical: the share of
answers with the plain loop's very tokens, and, where one differs, the model's largest gap between its two likeliest
tokens there. loops: the share of answers that ended in repetition.

The JSON has settings, machine, rows (one for each method and category; mt_bench and all are sums), differences and
the records of single questions. Until it is complete, FILE.partial.jsonl has the questions that are done; the same
command goes on behind them.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        check_writable(args.plot, "--plot")
        if args.plot is not None:
            check_plot(args.plot)
        report = read_report(args.report) if args.report is not None else run_bench(args)
        print(format_tables(report["rows"]))
        if args.plot is not None:
            draw_plot(report, args.plot)


def make_parser() -> Parser:
    parser = Parser(
        prog="bench.py", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--questions", type=Path, metavar="FILE", help="JSONL with question_id, category and turns")
    source.add_argument("--from", dest="report", type=Path, metavar="JSON", help="show an earlier run's, run nothing")
    parser.add_argument(
        "--methods",
        help=f"by commas, of {', '.join(PROPOSERS)}; none is always among them; {', '.join(HEAD_PROPOSERS)} can name "
        f"nodes and tree: hydra-16, hydra-static-64; {', '.join(EAGLES)} a chain: eagle3-chain-5; "
        "hydra-sampled-16 draws its guesses at random (default: all that the models allow)",
    )
    parser.add_argument(
        "--peers",
        help=f'by commas, of {", ".join(PEERS)}; hf is always among them; "" for none of them (default: all that the '
        "models and --batch-size allow)",
    )
    parser.add_argument(
        "--limit", type=at_least(1), metavar="N", help="questions in all, as many of each of Spec-Bench's six tasks"
    )
    parser.add_argument("--repeats", type=at_least(1), default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default: no chance")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--batch-size", type=at_least(1), default=1, metavar="N", help="questions of a category at a time (default: 1)"
    )
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="CPU threads (default: torch's own choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, and go on with them when cut off")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them: a .png or .svg file")
    add_model_options(parser)
    parser.add_argument(
        "--draft-model",
        help="for draft and hf-assistant: a smaller model with the same vocabulary, folder or hub id "
        f"(default, with the default model only: its own first {DRAFT_LAYERS} layers)",
    )
    parser.add_argument(
        "--head",
        action="append",
        default=[],
        type=name_head,
        metavar="KIND=DIR",
        help=f"for {', '.join(HEAD_PROPOSERS)}: the folder of a head trained for the model, e.g. medusa=DIR; repeatable "
        "(default, with the default model only: its pretrained ones)",
    )
    return parser


def name_head(text: str) -> tuple[str, str]:
    """An argparse type: a kind of head and its folder."""
    kind, separator, folder = text.partition("=")
    if kind not in HEAD_PROPOSERS or not separator or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not KIND=DIR with a KIND of {', '.join(HEAD_PROPOSERS)}")
    return kind, folder


def run_bench(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what is asked for and return the report, written to `--json` where that is given."""
    names, peers = choose_methods(args)
    check_writable(args.json, "--json")
    Sampling(args.temperature)  # refuses a bad one
    questions = take_evenly(load_questions(args.questions), args.limit)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    target = load_ours(args.model, args)
    check_prompts(questions, target)
    setup = {
        "settings": describe_settings(args, names, peers, questions),
        "machine": {
            **describe_machine(target.device),
            "dtype": str(target.dtype).removeprefix("torch."),
            "compiled": target.compiled,
        },
    }
    records = Records(args.json and args.json.with_name(args.json.name + ".partial.jsonl"), setup)
    methods = {**make_loops(names, target, args), **make_peers(peers, target, args)}
    measure_all(methods, form_groups(questions, args.batch_size), records, target, args)
    differences = [difference for record in records.found for difference in record["differences"]]
    report = {
        **setup,
        "rows": make_rows(records.found, differences, list(methods)),
        "differences": differences,
        "records": [{key: record[key] for key in record if key != "differences"} for record in records.found],
    }
    if args.json is not None:
        write_report(args.json, report)
        records.remove()
    return report


def measure_all(
    methods: dict[str, Method],
    groups: Sequence[Sequence[Question]],
    records: Records,
    target: Target,
    args: argparse.Namespace,
) -> None:
    """Complete the records, group by group."""
    records.begin()
    done = len(records.found)
    if done == len(groups):
        return
    plan = Plan(args.repeats, args.max_new_tokens, args.temperature, args.seed)
    total, kept = sum(map(len, groups)), sum(map(len, groups[:done]))
    if kept:
        print(f"bench.py: going on behind {kept} of {total} questions", file=sys.stderr)
    with tqdm(total=total, initial=kept, unit="question", disable=None) as bar:
        bar.set_postfix_str("warming up")
        warm_up(methods, max(groups, key=len), target, plan)
        for place, group in enumerate(groups[done:], start=done):
            bar.set_postfix_str(group[0].category)
            records.append(measure_group(methods, group, place, target, plan))
            bar.update(len(group))


def choose_methods(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The proposers and the peers to be measured, baselines first. Raises ValueError for those that cannot be."""
    check_devices(args)
    fits = args.model is None or args.draft_model is not None
    names = _split(args.methods, [name for name in PROPOSERS if _has_models(name, args, fits)])
    default = [name for name in PEERS if fits or name != "hf-assistant"] if args.batch_size == 1 else []
    peers = _split(args.peers, default)
    unknown = next((name for name in peers if name not in PEERS), None)
    if unknown is not None:
        raise ValueError(f"unknown peer {unknown!r}; choose from {', '.join(PEERS)}")
    lacking = [name for name in ("draft", "hf-assistant") if name in (*names, *peers) and not fits]
    if lacking:
        raise ValueError(f"{lacking[0]} needs --draft-model, a smaller model with the vocabulary of --model")
    for kind in {split_method(name)[0] for name in names} & {*HEAD_PROPOSERS}:
        find_head(kind, dict(args.head).get(kind), args.model)
    if peers and args.batch_size > 1:
        raise ValueError(f"{peers[0]} answers one question at a time; leave out --peers or --batch-size")
    return list(dict.fromkeys(["none", *names])), list(dict.fromkeys(["hf", *peers])) if peers else []


def _has_models(name: str, args: argparse.Namespace, fits: bool) -> bool:
    """Whether the models at hand allow a method that was not asked for by name."""
    if name in HEAD_PROPOSERS:
        return name in dict(args.head) or (args.model is None and (PRETRAINED / name).is_dir())
    return fits or name != "draft"


def _split(given: str | None, default: list[str]) -> list[str]:
    return default if given is None else [name.strip() for name in given.split(",") if name.strip()]


def describe_settings(
    args: argparse.Namespace, names: Sequence[str], peers: Sequence[str], questions: Sequence[Question]
) -> dict[str, Any]:
    """What was asked for, without any folder's name."""
    draft = None
    if {"draft", "hf-assistant"} & {*names, *peers}:
        draft = _base(args.draft_model) if args.draft_model else f"its first {DRAFT_LAYERS} layers"
    return {
        "model": _base(args.model) if args.model else DEFAULT_MODEL,
        "draft_model": draft,
        "heads": {kind: f"{_base(folder)} {_digest(folder)}" for kind, folder in args.head},
        "methods": list(names),
        "peers": list(peers),
        "questions": args.questions.name,
        "questions_sha256": digest_questions(questions),
        "limit": args.limit,
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "temperature": args.temperature,
        "seed": args.seed,
        "batch_size": args.batch_size,
        "accelerate": args.accelerate,
    }


def _digest(folder: str) -> str:
    """Tells what a head's folder holds from what it held before."""
    files = sorted(file for file in Path(folder).glob("*") if file.suffix in (".json", ".safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _base(name: str) -> str:
    """A hub id as it is, of a folder the last name."""
    return Path(name).resolve().name if Path(name).exists() else name


if __name__ == "__main__":
    main()
