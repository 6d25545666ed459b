"""Draftless and llama.cpp on the same questions and the same GGUF file: tokens per second, prompts included and not.

    python -m docs.measure.time_llama --questions spec_bench_dev.jsonl --gguf FILE.gguf --llama-bench PROGRAM

llama-bench cannot answer a question. It reads a prompt of the same length and generates as many tokens as Draftless
did. All programs take turns within a question. Prints all tokens over all seconds, and ratios to llama.cpp with 95 %
bootstrap intervals over the questions. Idle machines only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from time import perf_counter

import torch

from decode import Proposer, Target, generate
from draftless_commands.shared.results import INTERVAL, resample
from proposers import load_proposer

LLAMA = "llama.cpp"
Times = dict[str, tuple[float, float]]  # by program: seconds of a question's prompt, and of its answer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--gguf", required=True, metavar="FILE")
    parser.add_argument("--llama-bench", required=True, metavar="PROGRAM")
    parser.add_argument("--methods", default="none,ngram,auto")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args()
    lines = options.questions.read_text(encoding="utf-8").splitlines()
    target = Target.load(options.gguf)
    target.warm_up()
    proposers = {name: load_proposer(name, target) for name in options.methods.split(",")}
    generate(target, "warm up", next(iter(proposers.values())), max_new_tokens=8)
    found: list[tuple[int, Times]] = []
    for line in lines[:: max(1, len(lines) // options.limit)][: options.limit]:
        found.append(time_question(target, json.loads(line)["turns"][0], proposers, options))
    print(f"{len(found)} questions, {sum(count for count, _ in found)} tokens\n")
    print("| program | tokens/s | of llama.cpp | answers alone | of llama.cpp |\n|---|---:|---:|---:|---:|")
    for name in (LLAMA, *proposers):
        cells = [f"{rate(found, name, part):.1f} | {describe_ratio(found, name, part)}" for part in (0, 1)]
        print(f"| {name} | {' | '.join(cells)} |")


def time_question(
    target: Target, question: str, proposers: dict[str, Proposer], options: argparse.Namespace
) -> tuple[int, Times]:
    """The number of tokens after the first one, and the seconds of each program."""
    times: Times = {}
    for name, proposer in proposers.items():
        begun = perf_counter()
        (first,) = generate(target, question, max_new_tokens=1)
        reading, begun = perf_counter() - begun, perf_counter()
        (answer,) = generate(target, question, proposer, max_new_tokens=options.max_new_tokens)
        times[name] = reading, perf_counter() - begun - reading
    count = len(answer.tokens) - 1
    times[LLAMA] = (
        run_llama(options, ["-p", len(first.prompt), "-n", 0]),
        run_llama(options, ["-p", 0, "-n", max(count, 1)]),
    )
    return count, times


def run_llama(options: argparse.Namespace, sizes: list[str | int]) -> float:
    """The seconds of one run of llama-bench, after one that does not count."""
    settings = ["-m", options.gguf, "-t", torch.get_num_threads(), "-r", 1, "-o", "json"]
    command = [str(part) for part in (options.llama_bench, *settings, *sizes)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(json.loads(output)[0]["avg_ns"]) / 1e9


def rate(found: list[tuple[int, Times]], name: str, part: int) -> float:
    """Tokens per second of a program; part 0 includes prompts, 1 does not."""
    return sum(count for count, _ in found) / sum(sum(times[name][part:]) for _, times in found)


def describe_ratio(found: list[tuple[int, Times]], name: str, part: int) -> str:
    pairs = [(sum(times[LLAMA][part:]), sum(times[name][part:])) for _, times in found]
    low, high = resample(pairs).quantile(INTERVAL).tolist()
    return f"{rate(found, name, part) / rate(found, LLAMA, part):.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
