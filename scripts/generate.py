"""Answer prompts with a model, faster and with the very text that it would give by itself."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this runs as a file, installed or not
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds; Ctrl-C ends them without a traceback

from decode import Answer, Chunk, Proposer, Sampling, Target, stream
from decode.text import encode
from proposers import HEAD_PROPOSERS
from proposers.load import EAGLES
from scripts.options import (
    AUTO,
    Parser,
    add_model_options,
    add_proposer_options,
    at_least,
    check_proposer,
    failing_clearly,
    load_target,
    make_proposer,
)
from scripts.shared.lanes import Lanes
from scripts.shared.painting import paints, show
from scripts.shared.prompts import check_prompt, read_prompts

NODES = 64  # the most of a tree
EPILOG = """\
On a colour terminal, text that was guessed and accepted is painted, from green (one token ahead) over blue to pink.

A prompt with several turns is a conversation: each turn is asked after the answers to those before it. All first
turns are answered before the second ones. One whose later turn has no room in the context ends there, the others go
on, and the exit status is 1.

With --json, each line is one answer: index (of the prompt, from 0), turn (from 0), prompt_tokens (how many), tokens
(ids, the end token included), text, finish (why it ended: eos, stop, length or context), steps (forward passes of
the model), tau (tokens a step), seconds, tokens_per_second, accepted_by_depth (how often a guess 1, 2, ... tokens
ahead was right).
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
        check_options(args)
        if args.prompt_file is None:
            prompts = [[check_prompt(args.prompt, "--prompt")]]
        else:
            prompts = read_prompts(args.prompt_file)
        conversations = [Conversation(index, turns) for index, turns in enumerate(prompts)]
        target = load_target(args)
        check_chat(conversations, target, args.chat)
        for conversation in conversations:
            conversation.encode(target, args.chat)  # one that does not fit is found before a draft model is loaded
        proposer = make_proposer(args.proposer, target, args)
        # Now, so that it is not in an answer's seconds.
        target.warm_up(min(args.batch_size, len(conversations)), measure=getattr(proposer, "adaptive", False))
        answer(conversations, target, proposer, sampling, args)
        if any(len(conversation.answers) < len(conversation.turns) for conversation in conversations):
            raise SystemExit(1)


def make_parser() -> Parser:
    parser = Parser(
        prog="generate.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", metavar="TEXT", help="the prompt")
    given.add_argument(
        "--prompt-file",
        metavar="FILE",
        help='a .jsonl file with "prompt" or "turns" in each line; any other file, or - for standard input, is plain '
        "text: one prompt",
    )
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put prompts into the model's chat template, or take them as they are (default: if it has a template)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object an answer instead of its text")
    add_model_options(parser)
    add_proposer_options(parser)
    group = parser.add_argument_group("answers")
    group.add_argument("--max-new-tokens", type=at_least(1), default=256, metavar="N", help="default: %(default)s")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, the likeliest token")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens only")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest share P only")
    group.add_argument(
        "--lossy-typical-acceptance",
        action="store_true",
        help="CHANGES THE TEXT at temperatures above 0: accept guesses that are merely plausible (Medusa's rule)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same text (default: %(default)s)")
    group.add_argument("--batch-size", type=at_least(1), default=1, metavar="N", help="prompts at a time (default: 1)")
    return parser


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together."""
    check_proposer(args.proposer, args)
    users = {"draft_model": ["draft"], "head": [*HEAD_PROPOSERS, AUTO], "tree": HEAD_PROPOSERS, "nodes": HEAD_PROPOSERS}
    users |= {"depth": EAGLES, "width": EAGLES, "sampled": HEAD_PROPOSERS}
    for option, proposers in users.items():
        if getattr(args, option) not in (None, False) and args.proposer not in proposers:
            name = option.replace("_", "-")
            raise ValueError(f"--{name} is for --proposer {', '.join(proposers)}, not for {args.proposer}")
    if args.width is not None and args.tree not in (None, "dynamic"):
        raise ValueError(f"--width is for --tree dynamic; {args.tree} has its own paths")
    if "" in args.stop:
        raise ValueError("--stop needs a text that is not empty")


@dataclass
class Conversation:
    """A prompt's turns, and the answers so far."""

    index: int
    turns: list[str]
    answers: list[str] = field(default_factory=list)

    def encode(self, target: Target, chat: bool | None) -> list[int]:
        """The tokens of the turn that is next. Raises ValueError where they leave no room in the context."""
        turn = len(self.answers)
        if len(self.turns) == 1:
            ids = encode(self.turns[0], target.tokenizer, chat)
        else:
            said = [text for pair in zip(self.turns, self.answers, strict=False) for text in pair]
            roles = ("user", "assistant") * turn + ("user",)
            messages = zip(roles, [*said, self.turns[turn]], strict=True)
            ids = encode([{"role": role, "content": text} for role, text in messages], target.tokenizer, chat)
        if len(ids) >= target.context:
            raise ValueError(
                f"prompt {self.index}, turn {turn}, has {len(ids)} tokens; the model's context of {target.context} "
                "leaves no room for an answer"
            )
        return ids


def check_chat(conversations: list[Conversation], target: Target, chat: bool | None) -> None:
    """Raise ValueError where a chat template is needed and there is none."""
    template = target.tokenizer is not None and target.tokenizer.chat_template is not None
    if chat and not template:
        raise ValueError("the model has no chat template; leave out --chat")
    several = next((conversation.index for conversation in conversations if len(conversation.turns) > 1), None)
    if several is not None and (chat is False or not template):
        reason = "--no-chat was given" if template else "this model has none"
        raise ValueError(f"prompt {several} has several turns, which need a chat template, and {reason}")


def answer(
    conversations: list[Conversation], target: Target, proposer: Proposer, sampling: Sampling, args: argparse.Namespace
) -> None:
    """Answer all first turns, then all second ones and so on, and print each answer."""
    turns = max(len(conversation.turns) for conversation in conversations)
    for turn in range(turns):
        # Rows are numbered within a turn and not within a batch: their draws must not depend on the batch size.
        asked, prompts = encode_turn(conversations, turn, target, args.chat)
        chunks = stream(
            target,
            prompts,
            proposer,
            batch_size=args.batch_size,
            sampling=sampling,
            max_new_tokens=args.max_new_tokens,
            stop=args.stop,
            nodes=args.nodes or NODES,
            lossy_typical_acceptance=args.lossy_typical_acceptance,
        )
        if args.json:
            print_json(chunks, asked)
        else:
            print_text(chunks, asked, titled=turns + len(conversations) > 2)


def encode_turn(
    conversations: list[Conversation], turn: int, target: Target, chat: bool | None
) -> tuple[list[Conversation], list[list[int]]]:
    """The conversations that have such a turn, and its tokens. Later ones that have no room end, and it is said."""
    asked, prompts = [], []
    for conversation in conversations:
        if len(conversation.answers) < turn or len(conversation.turns) <= turn:
            continue
        try:
            prompts.append(conversation.encode(target, chat))
        except ValueError as error:
            if turn == 0:
                raise
            print(f"{error}: it ends here", file=sys.stderr)
            continue
        asked.append(conversation)
    return asked, prompts


def print_text(chunks: Iterator[Chunk], asked: list[Conversation], titled: bool) -> None:
    """Print answers as they grow, one below the other, and the figures of each on stderr."""
    painted = paints(sys.stdout)
    with Lanes(len(asked)) as lanes:
        for row, conversation in enumerate(asked if titled else ()):
            lanes.put(row, f"--- prompt {conversation.index}, turn {len(conversation.answers)} ---\n")
        for chunk in chunks:
            lanes.put(chunk.request_id, show(chunk, painted))
            if chunk.answer is not None:
                asked[chunk.request_id].answers.append(chunk.answer.text)
                lanes.put(chunk.request_id, "\n")
                lanes.put(chunk.request_id, describe(chunk.answer) + "\n", sys.stderr)
                lanes.end(chunk.request_id)


def print_json(chunks: Iterator[Chunk], asked: list[Conversation]) -> None:
    """Print each finished answer as a line of JSON."""
    with Lanes(len(asked)) as lanes:
        for chunk in chunks:
            if chunk.answer is not None:
                conversation = asked[chunk.request_id]
                place = {"index": conversation.index, "turn": len(conversation.answers)}
                conversation.answers.append(chunk.answer.text)
                lanes.put(chunk.request_id, json.dumps(place | gather_figures(chunk.answer)) + "\n")
                lanes.end(chunk.request_id)


def describe(answer: Answer) -> str:
    """What an answer cost and what guessing brought, in one line."""
    stats = answer.stats
    depths = " ".join(map(str, stats.accepted_by_depth)) or "none"
    return (
        f"{len(answer.prompt)} prompt tokens, {stats.tokens} tokens in {stats.steps} steps (tau {stats.tau:.2f}), "
        f"{stats.seconds.total:.2f} s, {stats.tokens_per_second:.1f} tokens/s, accepted by depth: {depths}"
    )


def gather_figures(answer: Answer) -> dict[str, Any]:
    """An answer as --json shows it."""
    stats = answer.stats
    return {
        "prompt_tokens": len(answer.prompt),
        "tokens": answer.tokens,
        "text": answer.text,
        "finish": answer.finish,
        "steps": stats.steps,
        "tau": stats.tau,
        "seconds": stats.seconds.total,
        "tokens_per_second": stats.tokens_per_second,
        "accepted_by_depth": stats.accepted_by_depth,
    }


if __name__ == "__main__":
    main()
