"""Let a model answer prompts in large batches: heads are best trained on the model's own answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
from tqdm import tqdm

from decode import Engine, Target
from decode.devices.backend import find_backend
from decode.models.default_model import NAME
from decode.scheduler import WHOLE
from draftless_commands.distillation.answers_file import AnswersFile
from draftless_commands.distillation.jobs import Job, answer_jobs, check_temperature, read_jobs
from draftless_commands.shared.command import Parser, at_least, check_writable, failing_clearly
from draftless_commands.shared.options import DEFAULT_MODEL, ModelOptions, add_model_options, list_heads, load_target
from draftless_commands.shared.prompts import TEMPLATE_OPTION
from proposers import check_options, load_proposer
from training.rendering import Renderer

MOST_DRAFTED = 16  # rows; passes over more take as long as their tokens
PROPOSER_HELP = f"""what drafts; it changes the speed, not the answers (default: auto in batches of up to
{MOST_DRAFTED}, none in larger ones)"""
CHANGED_HELP = "go on in FILE although weights, vocabulary or chat template of the model have changed"
EPILOG = """\
PROMPTS is a .jsonl file with "prompt", "turns", "messages" or "conversations" in each line (docs/training.md has the
formats). An answer after the last question is replaced by the model's. A line may also have "id" (default: its number,
after the file's name if there are several files), "source" (default: the file's name) and "temperature". Any other
file, or - for standard input, is plain text: one prompt.

Each line of FILE is one answer, in the order in which they were finished: id, source, temperature, prompt, response
(messages for chats), finished (whether the model ended it), response_tokens (number), token_ids (of prompts and
answers: for training), vocabulary (its fingerprint). An answer can have no response but "dropped": "loop" (the
last 60 tokens repeat with a period under 20), "context" (no room after the prompt), "empty" (cut off before the first
word), "template" (the chat template fails) or "nan" (the model's logits are NaN or infinite). If a later turn is
dropped, the line is the conversation before it, with the reason in "cut". An answer that is cut off ends its
conversation.

Start an interrupted run again, and prompts whose answers are in FILE are not asked again; their settings are in
FILE.settings.json, with fingerprints of the model's weights, vocabulary and chat template. Of several temperatures
each prompt gets one, chosen by its id: --temperature 0 0 0.8 makes two thirds greedy. On CPUs with bfloat16
instructions, the default --dtype is bfloat16, not float32. Rounding then depends on the batch, so after an
interruption some answers can differ (rarely in float32 too).
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        model = choose_dtype(ModelOptions.from_args(args))
        check_options(choose_proposer(args), {}, pretrained=model.may_be_default)
        model = model.for_heads(list_heads(choose_proposer(args), None))
        check_writable(args.out, "--out")
        for value in args.temperature:
            check_temperature(value, "--temperature")
        jobs = read_jobs(args.prompts, args.temperature)
        depending = {name: getattr(args, name) for name in ("temperature", "max_new_tokens", "seed")}
        depending["template_options"] = dict(args.template_option or ())
        answers = AnswersFile(args.out, {"model": model.model or NAME, "dtype": model.dtype, **depending})
        missing = answers.list_missing(jobs)
        if missing:
            target = load_target(model)
            renderer = Renderer(target.tokenizer, args.template_option)
            for job in missing:
                if job.conversation.options or len(job.conversation.messages) > 1:
                    renderer.encode(job.conversation)  # raises what a template refuses before any work
            answers.begin(target.fingerprints, args.changed_model)
            distil(missing, target, renderer, answers, args)
        answers.check()
        print(answers.describe())


def make_parser() -> Parser:
    parser = Parser(prog="draftless distill", description=__doc__, epilog=EPILOG)
    parser.add_argument("prompts", nargs="+", metavar="PROMPTS", help="files of prompts")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="answers are appended here, one a line")
    parser.add_argument("--changed-model", action="store_true", help=CHANGED_HELP)
    parser.add_argument("--template-option", **TEMPLATE_OPTION)
    add_model_options(parser, f"{DEFAULT_MODEL}, fetched once")
    parser.set_defaults(accelerate="packed")  # compiled kernels are for smaller batches
    group = parser.add_argument_group("answers")
    group.add_argument(
        "--temperature", nargs="+", type=float, default=[0.0], metavar="T", help="one or several (default: 0, greedy)"
    )
    group.add_argument("--max-new-tokens", type=at_least(1), default=256, metavar="N", help="default: %(default)s")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same answers (default: 0)")
    group.add_argument("--proposer", metavar="NAME", help=PROPOSER_HELP)
    group.add_argument("--batch-size", type=at_least(1), default=160, metavar="N", help="default: %(default)s")
    return parser


def choose_dtype(model: ModelOptions) -> ModelOptions:
    """The options with bfloat16 for a CPU that is fast in it, unless a format was given."""
    anywhere = model.device is None and model.device_map is None and not torch.cuda.is_available()
    fast = (model.device == "cpu" or anywhere) and find_backend(torch.device("cpu")).is_fast_in_bfloat16
    return replace(model, dtype="bfloat16") if model.dtype is None and fast else model


def choose_proposer(options: argparse.Namespace) -> str:
    """The name of --proposer; without it, large batches draft nothing."""
    return options.proposer or ("auto" if options.batch_size <= MOST_DRAFTED else "none")


def distil(
    jobs: Sequence[Job], target: Target, renderer: Renderer, answers: AnswersFile, options: argparse.Namespace
) -> None:
    """Answer all jobs and add their rows to the file, with a progress bar."""
    proposer = load_proposer(choose_proposer(options), target)
    engine = Engine(target, proposer, rows=min(options.batch_size, len(jobs)), part=WHOLE, kept_bytes=0)
    started, tokens, done, dropped = perf_counter(), 0, len(answers.rows), 0
    interval = 1 if sys.stderr.isatty() else 60  # one line a minute in a log
    with tqdm(total=done + len(jobs), initial=done, unit=" answers", mininterval=interval) as bar:
        for new, row in answer_jobs(jobs, engine, renderer, options.max_new_tokens, options.seed):
            tokens += new
            if row is not None:
                answers.append(row)
                dropped += "dropped" in row
                speed = tokens / (perf_counter() - started)
                bar.set_postfix_str(f"{speed:.0f} tokens/s, {dropped} dropped", refresh=False)
                bar.update()


if __name__ == "__main__":
    main()
