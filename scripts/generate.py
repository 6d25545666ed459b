"""Answer prompts with a model, faster and with the same text as plain decoding."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentTypeError, BooleanOptionalAction
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from decode import Answer, Chunk, Grammar, Sampling, stream
from draftless_commands.shared.command import Parser, at_least, check_writable, failing_clearly
from draftless_commands.shared.options import (
    STORE_HELP,
    add_model_options,
    add_proposer_options,
    choose_model,
    load_target,
    make_proposer,
)
from draftless_commands.shared.prompts import TEMPLATE_OPTION, ask, encode_turn, read_conversations
from draftless_commands.shared.terminal import format_chunk, has_colour, in_order
from proposers import AnswerStore
from proposers.options import OPTIONS
from training.conversations import Conversation
from training.rendering import Renderer

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
SETTINGS = ("batch_size", "max_new_tokens", "stop", "nodes", "grammar", "lossy_typical_acceptance")
PROMPT_FILE_HELP = """a .jsonl file with "prompt", "turns", "messages" or "conversations" in each line (docs/training.md
has the formats); any other file, or - for standard input, is one plain-text prompt"""
CHAT_HELP = """put prompts into the model's chat template, or leave them as they are (default: if it has a template)"""
MIN_P_HELP = "sample from tokens at least P times as probable as the most likely one"
GRAMMAR_HELP = """what each answer must look like: "json", a JSON schema (a .json file), a Lark grammar (a .lark file)
or a /regular expression/"""
LOSSY_HELP = """CHANGES THE TEXT at temperatures above 0: accept draft tokens that are merely plausible (Medusa's
rule)"""
EPILOG = """\
On a colour terminal, accepted draft tokens are coloured: green (one token ahead) over blue to pink.

A prompt with several turns is a conversation: each turn is asked after the answers to the earlier turns. All first
turns are answered before the second ones. A conversation ends early if its next turn does not fit into the context;
the others continue, and the exit status is 1. A prompt whose logits are NaN or infinite ends with a line on stderr; the
others continue, and the exit status is 2.

With --json, each line is one answer: index (of the prompt, from 0), turn (from 0), prompt_tokens (number), tokens
(ids, end token included), text, finish (eos, stop, grammar, length, context or error), steps (forward passes of the
model), tau (tokens per step), tokens_per_second, accepted_by_depth (accepted draft tokens 1, 2, ... tokens ahead),
seconds, error (what ended it, if finish is error).
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        sampling = Sampling(**{name: getattr(args, name) for name in SAMPLING})
        model = choose_model(args)
        check_writable(args.store and Path(args.store), "--store")
        lock = args.store and hold(args.store)  # noqa: F841  until the end
        if "" in args.stop:
            raise ValueError("--stop needs a text that is not empty")
        if args.grammar is not None:
            Grammar(args.grammar)  # finds a missing file or a bad schema before a model is loaded
        path = args.prompt_file
        conversations = read_conversations(path) if path is not None else [ask([args.prompt], "--prompt")]
        store = AnswerStore() if "store" in OPTIONS.get(args.proposer, ()) else None
        kept = args.store if store is not None and args.store is not None and Path(args.store).exists() else None
        if kept is not None:
            store.load(kept)  # finds a damaged file
        target = load_target(model)
        renderer = Renderer(target.tokenizer, args.template_option, args.chat)
        encode_turn(conversations, 0, target, renderer)  # finds prompts that do not fit before a draft model is loaded
        if kept is not None:
            store.load(kept, target)
        proposer = make_proposer(args, target, store)
        if getattr(proposer, "adaptive", False):  # before the first answer, to keep it out of its seconds
            target.warm_up(min(args.batch_size, len(conversations)))
        settings = {name: getattr(args, name) for name in SETTINGS}
        turns, failed = max(1 + len(conversation.later) for conversation in conversations), list[str]()

        def keep() -> None:
            if store is not None and args.store is not None:
                proposer.keep_answers()
                store.save(args.store, target)

        try:
            # One stream per turn, not per batch: request ids, and so the random draws, do not depend on its size.
            for turn in range(turns):
                asked, encoded = encode_turn(conversations, turn, target, renderer)
                if not asked:
                    break
                chunks = stream(target, encoded, proposer, sampling=sampling, **settings)
                titled = turns + len(conversations) > 2
                failed += print_answers(chunks, {index: conversations[index] for index in asked}, args.json, titled)
        except BaseException:
            with suppress(Exception):  # the first error is told
                keep()
            raise
        keep()
        if failed:
            raise ValueError("; ".join(failed))
        if any(conversation.is_open for conversation in conversations):
            raise SystemExit(1)


def hold(store: str) -> FileLock:
    """What keeps other runs from a store's file as long as it lives. Raises ValueError if one has it."""
    lock = FileLock(f"{store}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise ValueError(f"--store {store} is used by another run, which will write it") from error
    return lock


def make_parser() -> Parser:
    parser = Parser(prog="draftless generate", description=__doc__, epilog=EPILOG)
    source = parser.add_mutually_exclusive_group(required=True).add_argument
    source("--prompt", metavar="TEXT", help="the prompt")
    source("--prompt-file", metavar="FILE", help=PROMPT_FILE_HELP)
    parser.add_argument("--template-option", **TEMPLATE_OPTION)
    parser.add_argument("--chat", action=BooleanOptionalAction, help=CHAT_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer instead of its text")
    add_model_options(parser)
    add_proposer_options(parser)
    parser.add_argument("--store", metavar="FILE", help=STORE_HELP)
    add, whole = parser.add_argument_group("answers").add_argument, at_least(1)
    add("--max-new-tokens", type=whole, default=256, metavar="N", help="default: %(default)s")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy decoding")
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens only")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the top-p nucleus only")
    add("--min-p", type=float, default=0.0, metavar="P", help=MIN_P_HELP)
    add("--grammar", type=read_grammar, metavar="G", help=GRAMMAR_HELP)
    add("--lossy-typical-acceptance", action="store_true", help=LOSSY_HELP)
    add("--seed", type=int, default=0, metavar="N", help="same seed, same text (default: %(default)s)")
    add("--batch-size", type=whole, default=1, metavar="N", help="prompts at a time (default: 1)")
    return parser


def read_grammar(text: str) -> Any:
    """A grammar on the command line, as `decode.stream` takes it."""
    if len(text) > 2 and text[0] == text[-1] == "/":
        try:
            return re.compile(text[1:-1])
        except (re.error, OverflowError, RecursionError) as error:
            raise ArgumentTypeError(f"{text} is no regular expression: {error}") from error
    if text != "json" and not text.endswith((".json", ".lark")):
        raise ArgumentTypeError(f"{text!r} is none of: json, a .json file, a .lark file, a /regular expression/")
    return text if text == "json" else Path(text)


def print_answers(chunks: Iterator[Chunk], asked: dict[int, Conversation], as_json: bool, titled: bool) -> list[str]:
    """Print answers in order: as they grow, with statistics on stderr, or each as a line of JSON at its end.

    Returns what is wrong with conversations that end here, because the answer ended in an error.
    """
    coloured, places, failed, begun = has_colour(sys.stdout), list(asked), list[str](), -1
    for chunk in end_line(in_order(chunks, len(asked)), as_json):
        place, answer = places[chunk.request_id], chunk.answer
        conversation = asked[place]
        if titled and not as_json and chunk.request_id != begun:
            print(f"--- prompt {place}, turn {conversation.answers} ---")
            begun = chunk.request_id
        if not as_json:
            print(format_chunk(chunk, coloured), end="" if answer is None else "\n", flush=True)
        if answer is None:
            continue
        if as_json:
            row = {"index": place, "turn": conversation.answers, **to_json(answer)}
            print(json.dumps(row) + "\n", end="", flush=True)  # a whole line also if Ctrl-C comes now
        else:
            print(describe(answer), file=sys.stderr, flush=True)
        if answer.error is None:
            conversation.add(answer.text)
        else:
            failed.append(f"prompt {place}: {answer.error.partition(': ')[2]}")
    return failed


def end_line(chunks: Iterator[Chunk], as_json: bool) -> Iterator[Chunk]:
    """The chunks; an error amid an answer that is printed as it grows begins on a line of its own."""
    answer: Answer | str | None = "none has begun"
    try:
        for chunk in chunks:
            answer = chunk.answer
            yield chunk
    except Exception:
        if answer is None and not as_json:
            print(flush=True)
        raise


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
    shown = {name: getattr(answer, name) for name in ("tokens", "text", "finish", "error")}
    stats = {name: getattr(answer.stats, name) for name in ("steps", "tau", "tokens_per_second", "accepted_by_depth")}
    return {"prompt_tokens": len(answer.prompt), **shown, **stats, "seconds": answer.stats.seconds.total}


if __name__ == "__main__":
    main()
