"""Measuring one forward pass over 1 to 64 nodes, with llama.cpp's for comparison."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import torch
from tqdm import trange

from decode import Target
from decode.models.cost_curve import open_filled, random_chain, time_pass
from scripts.benchmark.files import describe_machine, find_commit, write_report
from scripts.benchmark.llama_bench import LlamaBench
from scripts.benchmark.options import name_model
from scripts.benchmark.pass_options import PassOptions
from scripts.benchmark.pass_report import LLAMA, OURS, sum_up_passes
from scripts.shared.options import load_target

NODES = (1, 2, 4, 8, 12, 16, 32, 64)
CONTEXTS = (256, 4000)
BATCH_SIZES = (1, 4)


def run_passes(options: PassOptions) -> dict[str, Any]:
    """Measure everything and return the report, also written to `options.json` if given."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    program, threads = options.llama_bench or "", torch.get_num_threads()
    llamas = {dtype: LlamaBench(program, file, threads, CONTEXTS[0]) for dtype, file in options.gguf.items()}
    targets = {dtype: load_target(replace(options.model, dtype=dtype)) for dtype in options.dtypes}
    first = targets[options.dtypes[0]]
    passes = time_passes(targets, choose_contexts(first.context), llamas, options.repeats)
    compiled = {dtype: target.compiled for dtype, target in targets.items()}
    report = {
        "settings": {
            "model": name_model(options.model),
            "accelerate": options.model.accelerate,
            "repeats": options.repeats,
            "llama_cpp": {dtype: llama.description for dtype, llama in llamas.items()},
            "commit": find_commit(),
        },
        "machine": {**describe_machine(first.device), "compiled": compiled},
        "passes": sum_up_passes(passes),
    }
    if options.json is not None:
        write_report(options.json, report)
    return report


def choose_contexts(limit: int, contexts: Sequence[int] = CONTEXTS) -> list[int]:
    """Those of the ascending contexts that fit into a model's context. Raises ValueError if none does."""
    fitting = [context for context in contexts if context + max(NODES) <= limit]
    if not fitting:
        raise ValueError(f"the model's context is {limit}; passes need {contexts[0] + max(NODES)}")
    for context in contexts[len(fitting) :]:
        print(f"bench.py: context {context} is left out: the model's context is {limit}", file=sys.stderr)
    return fitting


@torch.inference_mode()  # as in the loop
def time_passes(
    targets: Mapping[str, Target],
    contexts: Sequence[int],
    llamas: Mapping[str, LlamaBench],
    repeats: int,
    batch_sizes: Sequence[int] = BATCH_SIZES,
) -> list[dict[str, Any]]:
    """The milliseconds of all passes in all rounds. A round has all of them, so that disturbances meet all alike."""
    passes, turns = [], []
    for dtype, target in targets.items():
        for context, batch in product(contexts, batch_sizes):
            session = open_filled(target, batch, context)
            passes.append(_start_entry(OURS, dtype, context, batch))
            for nodes, samples in zip(NODES, passes[-1]["samples_ms"], strict=True):
                turns.append((session, random_chain(nodes, batch, target), samples))
    peers = [_start_entry(LLAMA, dtype, llama.context, 1) for dtype, llama in llamas.items()]
    for number in trange(repeats, unit="round", disable=None):
        for session, chain, samples in Random(number).sample(turns, len(turns)):
            time_pass(session, chain)  # passes of a decoding follow others of their kind, and so do llama-bench's
            samples.append(1000 * time_pass(session, chain))
        for peer in peers:
            for samples, new in zip(peer["samples_ms"], llamas[peer["dtype"]].time(NODES), strict=True):
                samples += new
    return [*passes, *peers]


def _start_entry(engine: str, dtype: str, context: int, batch: int) -> dict[str, Any]:
    setting = {"engine": engine, "dtype": dtype, "context": context, "batch": batch}
    return {**setting, "nodes": [*NODES], "samples_ms": [[] for _ in NODES]}
