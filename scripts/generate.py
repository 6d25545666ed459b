"""Answer prompts with a model, faster and with the very text that it would give by itself."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this runs as a file, installed or not

from decode import Answer, Chunk, Sampling, Target, stream
from decode.text import encode
from scripts.options import (
    Parser,
    add_model_options,
    add_proposer_options,
    at_least,
    check_proposer,
    failing_clearly,
    load_target,
    make_proposer,
)
from scripts.prompts import check_prompt, read_prompts

RAMP = (114, 78, 79, 80, 81, 75, 69, 105, 141, 177, 176, 212)  # terminal colours, green to pink: deeper guesses
EPILOG = """\
On a colour terminal, text that was guessed and accepted is painted, from green (one token ahead) over blue to pink.
Where a prompt has several turns, each one is asked after the answers to those before it, and all first turns are
answered before the second ones. With --json, each line is one answer: index (of the prompt, from 0), turn (from 0),
prompt_tokens (how many), tokens (ids, the end token included), text, finish (why it ended: eos, stop, length or
context), steps (forward passes of the model), tau (tokens a step), seconds, tokens_per_second, accepted_by_depth
(how often a guess 1, 2, ... tokens ahead was right).
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        sampling = Sampling(args.temperature, args.top_k, args.top_p, seed=args.seed)
        check_proposer(args.proposer, args)
        prompts = [[check_prompt(args.prompt, "--prompt")]] if args.prompt_file is None else read_prompts(args.prompt_file)
        conversations = [Conversation(index, turns) for index, turns in enumerate(prompts)]
        check_turns(conversations, args.chat)
        target = load_target(args)
        answer(conversations, target, sampling, args)


def make_parser() -> Parser:
    parser = Parser(
        prog="generate.py", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", help="the prompt")
    given.add_argument(
        "--prompt-file",
        metavar="FILE",
        help='a .jsonl file, with "prompt" or "turns" in each line; any other file, and - for standard input, is plain '
        "text: a single prompt",
    )
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put prompts into the model's chat template, or take them as they are (default: where it has one)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object an answer, instead of the text")
    add_model_options(parser)
    add_proposer_options(parser)
    group = parser.add_argument_group("answers")
    group.add_argument("--max-new-tokens", type=at_least(1), default=256, metavar="N", help="default: %(default)s")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default: no chance")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest (default: all)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest P (default: 1)")
    group.add_argument("--seed", type=int, default=0, help="the same seed, the same text (default: %(default)s)")
    group.add_argument("--batch-size", type=at_least(1), default=1, metavar="N", help="prompts at a time (default: 1)")
    return parser


@dataclass
class Conversation:
    """A prompt's turns, and the answers so far."""

    index: int
    turns: list[str]
    answers: list[str] = field(default_factory=list)

    def encode(self, target: Target, chat: bool | None) -> list[int]:
        """The tokens of what is to be answered next. Raises ValueError where they do not fit into the context."""
        turn = len(self.answers)
        said = [text for pair in zip(self.turns, self.answers, strict=False) for text in pair] + [self.turns[turn]]
        messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * turn + ("user",), said)]
        ids = encode(messages if len(self.turns) > 1 else self.turns[0], target.tokenizer, chat)
        if len(ids) >= target.context:
            raise ValueError(
                f"prompt {self.index}{f', turn {turn},' if turn else ''} has {len(ids)} tokens; the model's context of "
                f"{target.context} leaves no room for an answer"
            )
        return ids
