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
from scripts.benchmark.tables import to_markdown
from scripts.calibration.measure_head import Trials, calibrate, try_head
from scripts.shared.command import Parser, at_least, failing_clearly
from scripts.shared.options import ModelOptions, add_model_options, load_target
from scripts.shared.prompts import add_template_option, encode_turn, read_prompts
from training.rendering import Renderer

EPILOG = """\
The model answers the prompts greedily, and the head drafts at each position of its answers. Use prompts that the head
was not trained on.

Written to DIR/calibration.json: acceptance (for each head, how often its draft token of rank 0, 1, ... is accepted if
its ancestors are), confidence (how to map its own probabilities to acceptance), expected_tau (of the best trees of 1,
2, ... nodes).
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


def make_parser() -> Parser:
    parser = Parser(prog="draftless calibrate", description=__doc__, epilog=EPILOG)
    add = parser.add_argument
    add("--head", type=Path, required=True, metavar="DIR", help="the head's folder")
    add("--prompt-file", required=True, metavar="FILE", help=PROMPT_FILE_HELP)
    add("--limit", type=at_least(1), metavar="N", help="use the first N prompts only")
    add("--max-new-tokens", type=at_least(3), default=128, metavar="N", help="default: %(default)s")
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
    measured = zip(calibration.positions, calibration.acceptance, strict=True)
    heads = [["head", "positions", *(f"rank {rank}" for rank in range(len(calibration.acceptance[0])))]]
    for number, (positions, row) in enumerate(measured, start=1):
        heads.append([str(number), str(positions), *(f"{share:.1%}" for share in row)])
    trees = [["nodes", "expected tau"]]
    taus = calibration.expect_tau(max(SHOWN))
    for nodes in (size for size in SHOWN if size <= len(taus)):
        trees.append([str(nodes), f"{taus[nodes - 1]:.2f}"])
    return f"{to_markdown(heads)}\n\n{to_markdown(trees)}"


if __name__ == "__main__":
    main()
