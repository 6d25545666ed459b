"""Measure how often a trained head is right, and save that in its folder, where drafting looks for it."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this runs as a file, installed or not
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds; Ctrl-C ends them without a traceback

from tqdm import tqdm

from decode import Target, stream
from decode.text import encode
from heads.checkpoint import find_folder
from proposers import HEAD_PROPOSERS, HeadProposer, NGramProposer
from proposers.calibration import Calibration
from proposers.load import load_draft_head
from proposers.measure_head import Trials, calibrate, try_head
from scripts.calibrate_plot import draw_calibration
from scripts.options import Parser, add_model_options, at_least, check_devices, failing_clearly, load_target
from scripts.shared.command import check_plot, check_writable
from scripts.shared.prompts import read_prompts

EPILOG = """\
The model answers the prompts greedily, and the head is asked at each position of its answers. Take prompts that the
head was not trained on.

Written to DIR/calibration.json: acceptance (of each head, how often its guess of rank 0, 1, ... is right where the
guesses before it are), confidence (how its own probabilities are to be read), best_tree (the first n - 1 paths are the
best tree of n nodes), expected_tau (of these trees, by nodes).
"""
SHOWN = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        check_devices(args)
        find_folder(args.head)
        if args.plot is not None:
            check_writable(args.plot, "--plot")
            check_plot(args.plot)
        prompts = [turns[0] for turns in read_prompts(args.prompt_file)][: args.limit]
        target = load_target(args)
        head = load_draft_head(args.head, target)
        proposer = HEAD_PROPOSERS[head.kind](head).prepare(target)
        parts = list(measure(target, proposer, prompts, args))
        calibration = calibrate(Trials.join(parts))
        print(describe(calibration))
        calibration.save(args.head)
        if args.plot is not None:
            name = head.config.target_name
            draw_calibration(calibration, f"{head.kind} head" + (f" for {name}" if name else ""), args.plot)


def make_parser() -> Parser:
    parser = Parser(
        prog="calibrate.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--head", type=Path, required=True, metavar="DIR", help="the head's folder")
    parser.add_argument(
        "--prompt-file",
        required=True,
        metavar="FILE",
        help='prompts: a .jsonl file with "prompt" or "turns" in each line, of which the first is asked',
    )
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="take the first N prompts only")
    parser.add_argument("--max-new-tokens", type=at_least(3), default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result: a .png or .svg file")
    add_model_options(parser)
    return parser


def measure(
    target: Target, proposer: HeadProposer, prompts: Sequence[str], args: argparse.Namespace
) -> Iterator[Trials]:
    """What the heads said along the target's own answers."""
    encoded = [encode(prompt, target.tokenizer, None) for prompt in prompts]
    settings = {"batch_size": 1, "max_new_tokens": args.max_new_tokens, "text": False}
    answers = (chunk.answer for chunk in stream(target, encoded, NGramProposer(), **settings) if chunk.answer)
    for answer in tqdm(answers, total=len(encoded), unit="answer", disable=None):
        if len(answer.tokens) > 1:
            yield try_head(target, proposer, answer.prompt, answer.tokens)


def describe(calibration: Calibration) -> str:
    """The acceptance by head and rank, and what trees of some sizes are worth."""
    ranks = range(len(calibration.acceptance[0]))
    lines = [
        "| head | positions |" + "".join(f" rank {rank} |" for rank in ranks),
        "|-----:|----------:|" + "-------:|" * len(ranks),
    ]
    for number, (row, positions) in enumerate(zip(calibration.acceptance, calibration.positions, strict=True), start=1):
        lines.append(f"| {number:4} | {positions:9} |" + "".join(f" {chance:6.1%} |" for chance in row))
    taus = calibration.expect_tau(max(SHOWN))
    lines += ["", "| nodes | expected tau | deepest |", "|------:|-------------:|--------:|"]
    for nodes in (size for size in SHOWN if size <= len(taus)):
        deepest = max(map(len, calibration.best_tree(nodes)))
        lines.append(f"| {nodes:5} | {taus[nodes - 1]:12.2f} | {deepest:7} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
