"""Let a model answer prompts, many at a time: its own answers are what its heads are trained on."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this runs as a file, installed or not
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds; Ctrl-C ends them without a traceback

import torch
from tqdm import tqdm

from decode import Sampling, Target, stream
from decode.cpu.acceleration import is_fast_in_bfloat16
from decode.models.default_model import NAME
from scripts.distill_rows import Answers, Job, check_temperature, read_jobs
from scripts.shared.command import Parser, at_least, check_writable, failing_clearly
from scripts.shared.options import ModelOptions, add_model_options, load_target
from training.data import has_looped

WINDOW = 8  # batches that are sorted by length: the cache is as wide as its longest row
TURNS = 4  # batches of conversations that are led at a time: a kill loses those

EPILOG = """\
PROMPTS is a .jsonl file with one of these in each line: "prompt"; "turns", questions that are asked one after the
other; "messages", a chat so far that ends with a question. A line may have its own "id" (else: its number, behind the
file's name where there are several files), "source" (else: the file's name) and "temperature". Any other file, or -
for standard input, is plain text: one prompt.

Each line of FILE is one answer: id, source, temperature, prompt, response (or messages, where turns or messages were
asked), finished (whether the model itself ended it), response_tokens. Answers that fall into a loop (the last 60
tokens repeat with a period under 20), prompts that leave no room in the context and answers that are cut off before
their first word have no response; "dropped" says "loop", "context" or "empty". Where that befalls a later turn, the
line is the conversation before it, and "cut" says why. An answer that is cut off ends its conversation.

A run that was interrupted or killed goes on where it stopped when it is started again: what is in FILE is not asked
again. FILE.settings.json keeps what the answers depend on. Lines are in the order in which answers were finished.

Of several temperatures each prompt gets one, chosen by its id: --temperature 0 0 0.8 makes two thirds greedy.

On a CPU with bfloat16 kernels, bfloat16 is the default --dtype here. In it, and less often in float32, batches of
other sizes round differently: after an interruption the answers are not always letter for letter the same.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        ModelOptions.from_args(args)  # refuses options that exclude each other
        check_writable(args.out, "--out")
        args.dtype = args.dtype or choose_dtype(args)
        temperatures = [check_temperature(value, "--temperature") for value in args.temperature]
        jobs = read_jobs(args.prompts, temperatures)
        answers = Answers(args.out, describe_settings(args))
        left = answers.left(jobs)
        if left:
            target = load_target(ModelOptions.from_args(args))
            check_chat(left, target)
            answers.begin()
            distil(left, target, answers, args)
        print(describe(answers))


def make_parser() -> Parser:
    parser = Parser(
        prog="distill.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPTS", help="files of prompts")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="where answers are added, a line each")
    add_model_options(parser)
    parser.set_defaults(accelerate="packed")  # its batches are larger than what kernels serve
    group = parser.add_argument_group("answers")
    group.add_argument(
        "--temperature", nargs="+", type=float, default=[0.0], metavar="T", help="one or several (default: 0, greedy)"
    )
    group.add_argument("--max-new-tokens", type=at_least(1), default=256, metavar="N", help="default: %(default)s")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same answers (default: 0)")
    group.add_argument("--batch-size", type=at_least(1), default=160, metavar="N", help="default: %(default)s")
    return parser


def choose_dtype(args: argparse.Namespace) -> str | None:
    """bfloat16 where a CPU computes in it, else None: the default of the model options."""
    on_cpu = args.device == "cpu" or (args.device is None and not torch.cuda.is_available())
    fast = on_cpu and args.device_map is None and is_fast_in_bfloat16(torch.device("cpu"))
    return "bfloat16" if fast else None


def describe_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the answers depend on."""
    return {
        "model": args.model or NAME,
        "dtype": args.dtype,
        "temperature": args.temperature,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
    }


def check_chat(jobs: Sequence[Job], target: Target) -> None:
    """Raise ValueError where a chat template is needed and there is none."""
    chat = next((job.id for job in jobs if not job.alone), None)
    if chat is not None and (target.tokenizer is None or target.tokenizer.chat_template is None):
        raise ValueError(f"the prompt with the id {chat!r} is a chat, which needs a template, and this model has none")


def distil(jobs: Sequence[Job], target: Target, answers: Answers, args: argparse.Namespace) -> None:
    """Answer all jobs, add their rows to the file, and show how it goes."""
    begun, tokens = perf_counter(), 0
    done = len(answers.done)
    # In a log, a line a minute is enough.
    interval = 1 if sys.stderr.isatty() else 60
    with tqdm(total=done + len(jobs), initial=done, unit=" answers", mininterval=interval) as bar:
        for group in arrange(jobs, args.batch_size):
            for new, row in answer(group, target, args):
                tokens += new
                if row is not None:
                    answers.append(row)
                    speed, dropped = tokens / (perf_counter() - begun), answers.dropped.total()
                    bar.set_postfix_str(f"{speed:.0f} tokens/s, {dropped} dropped", refresh=False)
                    bar.update()


def arrange(jobs: Sequence[Job], batch_size: int) -> Iterator[list[Job]]:
    """The jobs in groups that are answered as one: of the same temperature, and not too many conversations."""
    for temperature in sorted({job.temperature for job in jobs}):
        alike = [job for job in jobs if job.temperature == temperature]
        single, several = ([job for job in alike if bool(job.later) == later] for later in (False, True))
        size = TURNS * batch_size
        yield from (group for group in (single, *_split(several, size)) if group)


def _split(jobs: list[Job], size: int) -> list[list[Job]]:
    return [jobs[begin : begin + size] for begin in range(0, len(jobs), size)]


def answer(asked: list[Job], target: Target, args: argparse.Namespace) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Answer a group of jobs, turn after turn. Yields numbers of new tokens, and the rows that they complete."""
    while asked:
        prompts = {job.number: job.encode(target.tokenizer) for job in asked}
        yield from ((0, job.drop("context")) for job in asked if len(prompts[job.number]) >= target.context)
        waiting = {job.number: job for job in asked if len(prompts[job.number]) < target.context}
        order = sort_by_length({number: len(prompts[number]) for number in waiting}, WINDOW * args.batch_size)

        def ends_in_loop(number: int, tokens: list[int], prompts: dict[int, list[int]] = prompts) -> bool:
            return has_looped(tokens[len(prompts[number]) :])

        chunks = stream(
            target,
            [prompts[number] for number in order],
            batch_size=args.batch_size,
            request_ids=order,
            sampling=Sampling(temperature=asked[0].temperature, seed=args.seed),
            max_new_tokens=args.max_new_tokens,
            criterion=ends_in_loop,
            text=False,
        )
        asked = []
        for chunk in chunks:
            job = waiting[chunk.request_id]
            row = job.take(chunk.answer) if chunk.answer is not None else None
            if chunk.answer is not None and row is None:
                asked.append(job)
            yield len(chunk.tokens), row


def sort_by_length(lengths: dict[int, int], window: int) -> list[int]:
    """The keys by their values, a window at a time, rising and falling by turns so that no step is steep."""
    keys, order = list(lengths), list[int]()
    for begin in range(0, len(keys), window):
        part = sorted(keys[begin : begin + window], key=lambda key: lengths[key])
        order += reversed(part) if begin // window % 2 else part
    return order


def describe(answers: Answers) -> str:
    """What the file has, in one line."""
    dropped = answers.dropped
    return (
        f"{answers.path}: {len(answers.done) - dropped.total()} answers, {answers.tokens} tokens; dropped: "
        f"{dropped['loop']} that fell into a loop, {dropped['context']} that the context has no room for, "
        f"{dropped['empty']} without a word; {answers.cut} conversations were cut before such an answer"
    )


if __name__ == "__main__":
    main()
