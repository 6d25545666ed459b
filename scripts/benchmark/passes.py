"""The time of one forward pass over 1 to 64 nodes, next to llama.cpp's.

An entry of a report has an `engine`, `dtype`, `context` (tokens before the pass), `batch`, `nodes`, and for each number
of nodes `samples_ms`. Draftless' entries have `weights`, what these are in.
"""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from decode import Target
from decode.costs import WARM, fill, random_chain, time_pass
from draftless_commands.benchmark.files import describe_machine, describe_weights, find_commit, name_numbers
from draftless_commands.shared.options import ModelOptions, load_target
from draftless_commands.shared.results import to_markdown

SIZES, CONTEXTS, BATCH_SIZES = (1, 2, 4, 8, 12, 16, 32, 64), (256, 4000), (1, 4)
DTYPES, ROUNDS = ("float32", "bfloat16"), 15
NAMES, OURS, LLAMA = ("engine", "dtype", "context", "batch"), "Draftless", "llama.cpp"
LLAMA_ROUNDS = 3  # passes of each size in a run of llama-bench
DESCRIPTION = ("model_type", "model_n_params", "build_commit")


def run_passes(args: Namespace) -> dict[str, Any]:
    """Measure everything and return the report. Raises ValueError for a model or a program that cannot be measured."""
    options, repeats = ModelOptions.from_args(args), args.repeats or ROUNDS
    dtypes = DTYPES if options.dtype is None else (options.dtype,)
    given = [each is not None for each in (args.llama_bench, args.gguf)]
    if any(given) and not (all(given) and options.dtype):
        raise ValueError("--llama-bench, --gguf and --dtype need each other: the program, its model, what is compared")
    llamas = {dtype: partial(run_llama_bench, args.llama_bench, args.gguf) for dtype in dtypes if all(given)}
    first = {dtype: run([1], 1)[1] for dtype, run in llamas.items()}  # finds errors before a model is loaded
    targets = {dtype: load_target(replace(options, dtype=dtype)) for dtype in dtypes}
    target = targets[dtypes[0]]
    contexts = [context for context in CONTEXTS if context + max(SIZES) <= target.context]
    if not contexts:
        raise ValueError(f"the model's context is {target.context}; passes need {CONTEXTS[0] + max(SIZES)}")
    passes = time_passes(targets, contexts, llamas, repeats)
    settings = {"model": options.name, "accelerate": options.accelerate, "repeats": repeats}
    settings["llama_cpp"] = {dtype: {name: entry[name] for name in DESCRIPTION} for dtype, entry in first.items()}
    settings["commit"] = find_commit()
    return {"settings": settings, "machine": describe_machine(target.device), "passes": passes}


def run_llama_bench(program: str, model: str, sizes: Sequence[int], repetitions: int) -> dict[int, dict[str, Any]]:
    """What llama.cpp's llama-bench prints for each size: one generated token, or a prompt of several.

    Raises ValueError if it fails.
    """
    prompts = ",".join(str(size) for size in sizes if size > 1) or 0
    settings = ["-r", repetitions, "-t", torch.get_num_threads(), "-d", CONTEXTS[0], "-o", "json"]
    command = [program, "-m", model, "-n", 1, "-p", prompts, *settings]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if ended.returncode:
        raise ValueError(f"{program} failed with status {ended.returncode}: {ended.stderr.strip()}")
    try:
        entries = json.loads(ended.stdout)
        return {each["n_prompt"] or 1: {name: each[name] for name in (*DESCRIPTION, "samples_ns")} for each in entries}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{program} did not print llama-bench's JSON ({error!r})") from error


@torch.inference_mode()  # as in the loop
def time_passes(
    targets: Mapping[str, Target], contexts: Sequence[int], llamas: Mapping[str, Callable[..., Any]], repeats: int
) -> list[dict[str, Any]]:
    """The milliseconds of all passes in all rounds. A round has all of them, so that disturbances meet all alike.

    llamas: `run_llama_bench` with a program and a model, by dtype.
    """
    passes, turns = [], []

    def begin(*settings: Any) -> list[list[float]]:
        entry = dict(zip(NAMES, settings, strict=True)) | {"nodes": [*SIZES], "samples_ms": [[] for _ in SIZES]}
        passes.append(entry)
        return entry["samples_ms"]

    for (dtype, target), context, batch in product(targets.items(), contexts, BATCH_SIZES):
        session = fill(target.open(batch), context)
        samples_ms, passes[-1]["weights"] = begin(OURS, dtype, context, batch), describe_weights(target)
        for nodes, samples in zip(SIZES, samples_ms, strict=True):
            turns.append((session, random_chain(nodes, batch, target), samples))
    peers = {dtype: begin(LLAMA, dtype, CONTEXTS[0], 1) for dtype in llamas}
    with tqdm(total=repeats * (len(turns) + len(llamas)), unit=" passes", disable=None) as bar:
        for number in range(repeats):
            for session, chain, samples in Random(number).sample(turns, len(turns)):
                # Passes of a decoding follow others of their kind, and so do llama-bench's. On a GPU, the first run one
                # by one, and then a graph is captured.
                for _ in range(1 if number else WARM - 1):
                    time_pass(session, chain)
                samples.append(1000 * time_pass(session, chain))
                bar.update()
            for dtype, run in llamas.items():
                found = run(SIZES, LLAMA_ROUNDS)
                for nodes, samples in zip(SIZES, peers[dtype], strict=True):
                    samples += [spent / 1e6 for spent in found[nodes]["samples_ns"]]
                bar.update()
    return passes


def find_medians(entry: Mapping[str, Any]) -> list[float]:
    """The milliseconds of a pass, by its number of nodes."""
    return [median(samples) for _, samples in zip(entry["nodes"], entry["samples_ms"], strict=True)]


def pair_engines(report: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    """Draftless' entries, each with llama.cpp's of the same settings, if there is one."""
    found = {tuple(entry[name] for name in NAMES): entry for entry in report["passes"]}
    return [(entry, found.get((LLAMA, *key[1:]))) for key, entry in found.items() if key[0] == OURS]


def format_passes(report: Mapping[str, Any]) -> str:
    """A table for each context, with a row for each number of nodes. Then weights that are in another format."""
    tables: dict[int, list[list[str]]] = {}
    for entry, peer in pair_engines(report):
        columns = tables.setdefault(entry["context"], [["nodes", *map(str, entry["nodes"])]])
        columns.append([f"{entry['dtype']}, batch {entry['batch']}", *_show_times(entry)])
        if peer is not None:
            ratios = (own / other for own, other in zip(find_medians(entry), find_medians(peer), strict=True))
            columns.append([LLAMA, *_show_times(peer)])
            columns.append([f"{OURS} / {LLAMA}", *(f"{ratio:.2f}" for ratio in ratios)])
    parts = []
    for context, columns in sorted(tables.items()):
        parts.append(f"Milliseconds of a pass after {context} tokens (and relative to one node):")
        parts.append(to_markdown([*zip(*columns, strict=True)]))
    named = {entry["dtype"]: name_numbers(entry) for entry, _ in pair_engines(report)}
    parts += [f"{dtype}: {numbers}" for dtype, numbers in named.items() if numbers != dtype]
    return "\n\n".join(parts)


def _show_times(entry: Mapping[str, Any]) -> list[str]:
    medians = find_medians(entry)
    return [f"{time:.1f} ({time / medians[0]:.2f}x)" for time in medians]
