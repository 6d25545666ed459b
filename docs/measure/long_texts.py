"""What drafts gain after long prompts: tau, speed, the share of drafting, and which sources accepted tokens are from.

    python -m docs.measure.long_texts spec_bench_dev.jsonl [--model MODEL] [--lengths 500,2000,7900] [--together 4]

A prompt has texts of other questions before its own, up to a number of tokens. Times leave out the pass that reads it.
Methods take turns within a prompt; their tokens are equal. --together also answers so many prompts of the greatest
length in one engine, for its time and memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from itertools import accumulate
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import perf_counter
from typing import Any

from decode import Chunk, Engine, Target, stream
from draftless_commands.benchmark.files import find_commit
from draftless_commands.benchmark.methods import parse_methods
from draftless_commands.benchmark.questions import load_questions, take_evenly
from proposers import load_proposer

METHODS = "none,ngram,suffix,recycling,merged,auto,eagle3:nodes=8,eagle3:nodes=8,head_window=512"


def make_prompts(target: Target, texts: list[str], length: int, count: int) -> list[list[int]]:
    """Chats of up to so many tokens; plain texts, if the model has no chats."""
    tokenizer, prompts = target.tokenizer, []
    assert tokenizer is not None
    for number in range(count):
        first = number * 7 % len(texts)
        own, *others = texts[first:] + texts[:first]
        sizes = [*accumulate(len(tokenizer.encode(text)) + 2 for text in [own, *others])]
        before = others[: sum(size < length - 64 for size in sizes) - 1]
        text = "\n\n".join([*before, own])
        chat = [{"role": "user", "content": text}]
        if tokenizer.chat_template:
            prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        else:
            prompts.append(tokenizer.encode(text))
    return prompts


def add_up(chunks: list[Chunk]) -> Counter[str]:
    """Counts and microseconds of the steps after the one that read the prompt, and accepted tokens by source."""
    found = Counter[str]()
    for chunk in chunks:
        found.update({"tokens": len(chunk.tokens), "steps": 1, "nodes": chunk.stats.nodes})
        seconds = chunk.stats.seconds
        found.update({"time": round(1e6 * seconds.total), "drafting": round(1e6 * seconds.proposer)})
        found.update(f"from {source}" for source in chunk.sources if source)
    return found


def measure(target: Target, prompts: list[list[int]], methods: str, new: int) -> dict[str, dict[str, Any]]:
    """By method: tau, tokens per second relative to plain decoding, and where time and tokens come from."""
    named, sums = parse_methods(methods), dict[str, Counter[str]]()
    for prompt in prompts:
        texts = set()
        for method in named:
            proposer = load_proposer(method.name, target, **method.options)
            settings = {"max_new_tokens": new, "text": False, "stop_ids": []}
            _, *chunks = stream(target, [prompt], proposer, **settings)
            texts.add(tuple(token for chunk in chunks for token in chunk.tokens))
            sums.setdefault(method.text, Counter()).update(add_up(chunks))
        assert len(texts) == 1
    plain = sums["none"]["tokens"] / sums["none"]["time"]
    return {
        name: {
            "tau": round(each["tokens"] / each["steps"], 2),
            "speed": round(each["tokens"] / each["time"] / plain, 2),
            "milliseconds": round(each["time"] / each["steps"] / 1e3, 1),
            "drafting": round(each["drafting"] / each["time"], 3),
            "nodes": round(each["nodes"] / each["steps"], 1),
            "accepted": {key.removeprefix("from "): count for key, count in each.items() if key.startswith("from ")},
        }
        for name, each in sums.items()
    }


def answer_together(target: Target, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """The time and memory of an engine that reads all prompts and answers them together."""
    engine, before, begun = Engine(target, "merged", rows=len(prompts)), find_gigabytes(), perf_counter()
    requests = [engine.add(prompt, max_new_tokens=new, text=False, stop_ids=[]) for prompt in prompts]
    read = 0.0
    while engine.is_busy:
        engine.step()
        read = read or (perf_counter() - begun if engine.running == len(prompts) else 0.0)
    seconds, more = perf_counter() - begun, find_gigabytes() - before
    engine.close()
    assert all(request.answer is not None and not request.answer.error for request in requests)
    times = {"reading_seconds": round(read, 1), "decoding_seconds": round(seconds - read, 1)}
    return {"tokens": [*map(len, prompts)], "new_tokens": new, **times, "more_gigabytes": round(more, 2)}


def find_gigabytes() -> float:
    """The most memory that this process has had."""
    return getrusage(RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--lengths", default="500,2000,7900")
    parser.add_argument("--prompts", type=int, default=4, help="of each length")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--together", type=int)
    args = parser.parse_args()
    target, lengths = Target.load(args.model), [*map(int, args.lengths.split(","))]
    target.warm_up()
    turns = [each.conversation.messages[-1]["content"] for each in take_evenly(load_questions(args.questions), 120)]
    found: dict[str, Any] = {"commit": find_commit(), "new_tokens": args.max_new_tokens, "prompts": args.prompts}
    for length in lengths:
        prompts = make_prompts(target, turns, length, args.prompts)
        found[str(length)] = measure(target, prompts, args.methods, args.max_new_tokens)
        print(f"{length} tokens are done", file=sys.stderr)
    if args.together:
        prompts = make_prompts(target, turns, max(lengths), args.together)
        found["together"] = answer_together(target, prompts, args.max_new_tokens)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
