"""Answer prompts with a model, faster and with the same text as plain decoding."""

from __future__ import annotations

import json
import signal
import sys
from argparse import BooleanOptionalAction
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, installed or not
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the slow imports ends without a traceback

from decode import Answer, Chunk, Sampling, Target, stream
from scripts.shared.command import Parser, at_least, failing_clearly
from scripts.shared.options import (
    ModelOptions,
    ProposerOptions,
    add_model_options,
    add_proposer_options,
    load_target,
    make_proposer,
)
from scripts.shared.prompts import check_prompt, encode_turns, read_prompts
from scripts.shared.terminal import OrderedOutput, format_chunk, has_colour

NODES = 64  # largest draft tree
EPILOG = """\
On a colour terminal, accepted draft tokens are coloured: green (one token ahead) over blue to pink.

A prompt with several turns is a conversation: each turn is asked after the answers to the earlier turns. All first
turns are answered before the second ones. A conversation ends early if its next turn does not fit into the context;
the others continue, and the exit status is 1.

With --json, each line is one answer: index (of the prompt, from 0), turn (from 0), prompt_tokens (number), tokens
(ids, end token included), text, finish (eos, stop, length or context), steps (forward passes of the model), tau
(tokens per step), seconds, tokens_per_second, accepted_by_depth (accepted draft tokens 1, 2, ... tokens ahead).
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
        model, drafting = ModelOptions.from_args(args), ProposerOptions.from_args(args)
        drafting.check(model)
        if "" in args.stop:
            raise ValueError("--stop needs a text that is not empty")
        if args.prompt_file is None:
            prompts = [[check_prompt(args.prompt, "--prompt")]]
        else:
            prompts = read_prompts(args.prompt_file)
        conversations = [Conversation(index, turns) for index, turns in enumerate(prompts)]
        target = load_target(model)
        check_chat(conversations, target, args.chat)
        for conversation in conversations:
            conversation.encode(target, args.chat)  # finds prompts that do not fit before a draft model is loaded
        proposer = make_proposer(drafting, target, model)
        # Before the first answer, to keep the warm-up out of its seconds.
        target.warm_up(min(args.batch_size, len(conversations)), measure=getattr(proposer, "adaptive", False))
        ask = partial(
            stream,
            target,
            proposer=proposer,
            batch_size=args.batch_size,
            sampling=sampling,
            max_new_tokens=args.max_new_tokens,
            stop=args.stop,
            nodes=args.nodes or NODES,
            lossy_typical_acceptance=args.lossy_typical_acceptance,
        )
        answer(conversations, target, ask, args.chat, args.json)
        if any(len(conversation.answers) < len(conversation.turns) for conversation in conversations):
            raise SystemExit(1)


def make_parser() -> Parser:
    parser = Parser(prog="generate.py", description=__doc__, epilog=EPILOG)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompts.add_argument(
        "--prompt-file",
        metavar="FILE",
        help='a .jsonl file with "prompt" or "turns" in each line; any other file, or - for standard input, is one '
        "plain-text prompt",
    )
    parser.add_argument(
        "--chat",
        action=BooleanOptionalAction,
        help="put prompts into the model's chat template, or leave them as they are (default: if it has a template)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer instead of its text")
    add_model_options(parser)
    add_proposer_options(parser)
    group = parser.add_argument_group("answers")
    group.add_argument("--max-new-tokens", type=at_least(1), default=256, metavar="N", help="default: %(default)s")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy decoding")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens only")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample from the top-p nucleus only")
    group.add_argument(
        "--lossy-typical-acceptance",
        action="store_true",
        help="CHANGES THE TEXT at temperatures above 0: accept draft tokens that are merely plausible (Medusa's rule)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same text (default: %(default)s)")
    group.add_argument("--batch-size", type=at_least(1), default=1, metavar="N", help="prompts at a time (default: 1)")
    return parser


@dataclass
class Conversation:
    """A prompt's turns, and the answers so far."""

    index: int
    turns: list[str]
    answers: list[str] = field(default_factory=list)

    def encode(self, target: Target, chat: bool | None) -> list[int]:
        """The tokens of the next turn. Raises ValueError if they leave no room in the context."""
        turn = len(self.answers)
        texts = [text for pair in zip(self.turns, self.answers, strict=False) for text in pair]
        ids = encode_turns([*texts, self.turns[turn]], target.tokenizer, chat)
        if len(ids) >= target.context:
            raise ValueError(
                f"prompt {self.index}, turn {turn}, has {len(ids)} tokens; the model's context of {target.context} "
                "leaves no room for an answer"
            )
        return ids


def check_chat(conversations: list[Conversation], target: Target, chat: bool | None) -> None:
    """Raise ValueError if a chat template is needed and there is none."""
    template = target.tokenizer is not None and target.tokenizer.chat_template is not None
    if chat and not template:
        raise ValueError("the model has no chat template; leave out --chat")
    several = next((conversation.index for conversation in conversations if len(conversation.turns) > 1), None)
    if several is not None and (chat is False or not template):
        reason = "--no-chat was given" if template else "this model has none"
        raise ValueError(f"prompt {several} has several turns, which need a chat template, and {reason}")


def answer(
    conversations: list[Conversation],
    target: Target,
    ask: Callable[[list[list[int]]], Iterator[Chunk]],
    chat: bool | None,
    as_json: bool,
) -> None:
    """Answer all first turns with `ask`, then all second ones and so on, and print each answer."""
    turns = max(len(conversation.turns) for conversation in conversations)
    for turn in range(turns):
        # One stream per turn, not per batch: request ids, and with them the random draws, do not depend on batch size.
        asked, prompts = encode_turn(conversations, turn, target, chat)
        if as_json:
            print_json(ask(prompts), asked)
        else:
            print_text(ask(prompts), asked, titled=turns + len(conversations) > 2)


def encode_turn(
    conversations: list[Conversation], turn: int, target: Target, chat: bool | None
) -> tuple[list[Conversation], list[list[int]]]:
    """The conversations that have this turn, and its tokens. Reports a later turn that does not fit and skips it."""
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
    """Print answers as they grow, one below the other, and the statistics of each on stderr."""
    coloured = has_colour(sys.stdout)
    with OrderedOutput(len(asked)) as output:
        for index, conversation in enumerate(asked if titled else ()):
            output.put(index, f"--- prompt {conversation.index}, turn {len(conversation.answers)} ---\n")
        for chunk in chunks:
            output.put(chunk.request_id, format_chunk(chunk, coloured))
            if chunk.answer is not None:
                asked[chunk.request_id].answers.append(chunk.answer.text)
                output.put(chunk.request_id, "\n")
                output.put(chunk.request_id, describe(chunk.answer) + "\n", sys.stderr)
                output.end(chunk.request_id)


def print_json(chunks: Iterator[Chunk], asked: list[Conversation]) -> None:
    """Print each finished answer as a line of JSON."""
    with OrderedOutput(len(asked)) as output:
        for chunk in chunks:
            if chunk.answer is not None:
                conversation = asked[chunk.request_id]
                place = {"index": conversation.index, "turn": len(conversation.answers)}
                conversation.answers.append(chunk.answer.text)
                output.put(chunk.request_id, json.dumps(place | to_json(chunk.answer)) + "\n")
                output.end(chunk.request_id)


def describe(answer: Answer) -> str:
    """The statistics of an answer in one line."""
    stats = answer.stats
    depths = " ".join(map(str, stats.accepted_by_depth)) or "none"
    return (
        f"{len(answer.prompt)} prompt tokens, {stats.tokens} tokens in {stats.steps} steps (tau {stats.tau:.2f}), "
        f"{stats.seconds.total:.2f} s, {stats.tokens_per_second:.1f} tokens/s, accepted by depth: {depths}"
    )


def to_json(answer: Answer) -> dict[str, Any]:
    """An answer as --json prints it."""
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
