"""Measure how often a trained head's draft tokens are accepted, and save that in its folder for drafting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from decode import Target, stream
from heads.checkpoint import find_folder
from proposers import HEAD_PROPOSERS, HeadProposer, NGramProposer
from proposers.calibration import Calibration
from proposers.load import load_draft_head
from scripts.calibration.measure_head import Trials, calibrate, try_head
from scripts.shared.command import Parser, at_least, check_plot, failing_clearly
from scripts.shared.options import ModelOptions, add_model_options, load_target
from scripts.shared.plot import COLOURS, save_figure
from scripts.shared.prompts import add_template_option, encode_turn, read_prompts
from training.rendering import Renderer

EPILOG = """\
The model answers the prompts greedily, and the head drafts at each position of its answers. Use prompts that the head
was not trained on.

Written to DIR/calibration.json: acceptance (for each head, how often its draft token of rank 0, 1, ... is accepted if
its ancestors are), confidence (how to map its own probabilities to acceptance), best_tree (the first n - 1 paths are
the best tree of n nodes), expected_tau (of these trees, by number of nodes).
"""
PROMPT_FILE_HELP = """prompts: a .jsonl file of prompts, conversations or distilled answers (docs/training.md has the
formats); of turns, only the first is used"""
SHOWN = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # numbers of nodes


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        model = ModelOptions.from_args(args)
        find_folder(args.head)
        check_plot(args.plot)
        conversations = [each for each in read_prompts(args.prompt_file) if "dropped" not in each.fields][: args.limit]
        if not conversations:
            raise ValueError(f"{args.prompt_file}: all answers were dropped; give other prompts")
        target = load_target(model)
        _, prompts = encode_turn(conversations, 0, target, Renderer(target.tokenizer, args.template_option))
        head = load_draft_head(args.head, target)
        proposer = HEAD_PROPOSERS[head.kind](head).prepare(target)
        calibration = calibrate(measure(target, proposer, prompts, args.max_new_tokens))
        print(describe(calibration))
        calibration.save(args.head)
        if args.plot is not None:
            name = head.config.target_name
            draw_calibration(calibration, f"{head.kind} head" + (f" for {name}" if name else ""), args.plot)


def make_parser() -> Parser:
    parser = Parser(prog="draftless calibrate", description=__doc__, epilog=EPILOG)
    add = parser.add_argument
    add("--head", type=Path, required=True, metavar="DIR", help="the head's folder")
    add("--prompt-file", required=True, metavar="FILE", help=PROMPT_FILE_HELP)
    add("--limit", type=at_least(1), metavar="N", help="use the first N prompts only")
    add("--max-new-tokens", type=at_least(3), default=128, metavar="N", help="default: %(default)s")
    add("--plot", type=Path, metavar="FILE", help="draw the result: a .png or .svg file")
    add_template_option(parser)
    add_model_options(parser)
    return parser


def measure(target: Target, proposer: HeadProposer, prompts: Sequence[list[int]], max_new_tokens: int) -> Trials:
    """The head's drafts along the target's own answers to the prompts."""
    chunks = stream(target, prompts, NGramProposer(), batch_size=1, max_new_tokens=max_new_tokens, text=False)
    answers = (chunk.answer for chunk in chunks if chunk.answer)
    trials = []
    for answer in tqdm(answers, total=len(prompts), unit="answer", disable=None):
        if answer.error is not None:
            raise ValueError(answer.error)
        if len(answer.tokens) > 1:
            trials.append(try_head(target, proposer, answer.prompt, answer.tokens))
    return Trials.join(trials)


def describe(calibration: Calibration) -> str:
    """Tables of the acceptance by head and rank, and of the expected tau by tree size."""
    ranks = range(len(calibration.acceptance[0]))
    lines = [
        "| head | positions |" + "".join(f" rank {rank} |" for rank in ranks),
        "|-----:|----------:|" + "-------:|" * len(ranks),
    ]
    for number, (row, positions) in enumerate(zip(calibration.acceptance, calibration.positions, strict=True), start=1):
        lines.append(f"| {number:4} | {positions:9} |" + "".join(f" {share:6.1%} |" for share in row))
    taus = calibration.expect_tau(max(SHOWN))
    lines += ["", "| nodes | expected tau | deepest |", "|------:|-------------:|--------:|"]
    for nodes in (size for size in SHOWN if size <= len(taus)):
        deepest = max(map(len, calibration.best_tree(nodes)))
        lines.append(f"| {nodes:5} | {taus[nodes - 1]:12.2f} | {deepest:7} |")
    return "\n".join(lines)


def draw_calibration(calibration: Calibration, title: str, path: Path) -> None:
    """Draw the acceptance by head and rank, and the expected tau by tree size."""
    with save_figure(path, 8, 3.4, font_size=9.5) as figure:
        left, right = figure.subplots(ncols=2)
        for number, row in enumerate(calibration.acceptance):
            left.plot(row, "o-", color=COLOURS[number % len(COLOURS)], markersize=4, label=f"{number + 2} tokens ahead")
        left.set(xlabel="rank of the draft token", ylabel="accepted, if its ancestors are", ylim=(0, None))
        left.legend(frameon=False)
        taus = calibration.expect_tau(max(SHOWN))
        right.plot(range(1, len(taus) + 1), taus, color=COLOURS[1])
        right.set(xlabel="nodes of the best tree", ylabel="expected tau", xlim=(1, None), ylim=(1, None))
        for axes in (left, right):
            axes.grid(color="#DDDDDD", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")


if __name__ == "__main__":
    main()
