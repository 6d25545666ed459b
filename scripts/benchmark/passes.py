"""The time of one forward pass over 1 to 64 nodes, next to llama.cpp's and to the time of reading its bytes once.

An entry of a report has an `engine`, `dtype`, `context` (tokens before the pass), `batch`, `nodes`, and for each number
of nodes `samples_ms`; ours also `floor_ms`, the least time by the bandwidth of memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from statistics import median
from typing import Any

import torch
from tqdm import trange
from transformers import PreTrainedModel

from decode import Target
from decode.cpu.acceleration import accelerate
from decode.models.cost_curve import open_filled, random_chain, time_pass
from scripts.benchmark.files import describe_machine, find_commit, write_report
from scripts.benchmark.llama_bench import LlamaBench
from scripts.benchmark.methods import clock
from scripts.benchmark.options import PassOptions, name_model
from scripts.benchmark.tables import to_markdown
from scripts.shared.options import load_model_only

NODES = (1, 2, 4, 8, 12, 16, 32, 64)
CONTEXTS = (256, 4000)
BATCH_SIZES = (1, 4)
COPIED = {"cuda": 1 << 30, "cpu": 1 << 28}  # bytes; more than any cache holds
OURS, LLAMA = "Draftless", "llama.cpp"
NOTE = "llama.cpp computes the logits of a pass's last token, Draftless those of all nodes."


def run_passes(options: PassOptions) -> dict[str, Any]:
    """Measure everything and return the report, also written to `options.json` if given."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    program, threads = options.llama_bench or "", torch.get_num_threads()
    llamas = {dtype: LlamaBench(program, file, threads, CONTEXTS[0]) for dtype, file in options.gguf.items()}
    targets, weights = {}, {}
    for dtype in options.dtypes:
        model, tokenizer = load_model_only(replace(options.model, dtype=dtype), "off")
        weights[dtype] = count_read_bytes(model)  # before layers are packed
        targets[dtype] = Target(accelerate(model, options.model.accelerate), tokenizer)
    first = targets[options.dtypes[0]]
    passes = time_passes(targets, choose_contexts(first.context), llamas, options.repeats)
    bandwidth = measure_bandwidth(first.device)
    token = {dtype: count_cache_bytes(target) for dtype, target in targets.items()}
    for entry in (entry for entry in passes if entry["engine"] == OURS):
        read = weights[entry["dtype"]] + entry["batch"] * entry["context"] * token[entry["dtype"]]
        entry["floor_ms"] = 1000 * read / bandwidth
    report = {
        "settings": {
            "model": name_model(options.model),
            "accelerate": options.model.accelerate,
            "repeats": options.repeats,
            "llama_cpp": {dtype: llama.description for dtype, llama in llamas.items()},
            "commit": find_commit(),
        },
        "machine": {**describe_machine(first.device), "bytes_per_second": bandwidth},
        "passes": passes,
    }
    if options.json is not None:
        write_report(options.json, report)
    return report


def choose_contexts(limit: int) -> list[int]:
    """The contexts that fit into a model's. Raises ValueError if none does."""
    fitting = [context for context in CONTEXTS if context + max(NODES) <= limit]
    if not fitting:
        raise ValueError(f"the model's context is {limit}; passes need {CONTEXTS[0] + max(NODES)}")
    for context in CONTEXTS[len(fitting) :]:
        print(f"draftless bench: context {context} is left out: the model's context is {limit}", file=sys.stderr)
    return fitting


@torch.inference_mode()  # as in the loop
def time_passes(
    targets: Mapping[str, Target], contexts: Sequence[int], llamas: Mapping[str, LlamaBench], repeats: int
) -> list[dict[str, Any]]:
    """The milliseconds of all passes in all rounds. A round has all of them, so that disturbances meet all alike."""
    passes, turns = [], []
    for dtype, target in targets.items():
        for context, batch in product(contexts, BATCH_SIZES):
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


def measure_bandwidth(device: torch.device, copies: int = 20) -> float:
    """Bytes a second: those that the fastest of some copies of a large tensor reads and writes."""
    source = torch.zeros(COPIED.get(device.type, COPIED["cpu"]), dtype=torch.uint8, device=device)
    there = torch.empty_like(source)
    return 2 * source.nbytes / min(clock(lambda: there.copy_(source), device)[1] for _ in range(copies))


def count_read_bytes(model: PreTrainedModel) -> int:
    """The bytes of the weights that a pass over one node reads: all but the input embeddings, unless they are tied."""
    embeddings, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return sum(each.nbytes for each in model.parameters()) - (0 if output is embeddings else embeddings.nbytes)


@torch.inference_mode()
def count_cache_bytes(target: Target) -> int:
    """The bytes of keys and values of one committed token."""
    session = open_filled(target, 1, 1)
    session.verify(random_chain(1, 1, target))
    pairs = (session.cache.allocated(number) for number in range(len(session.cache.layers)))
    return sum(states[:, :, :1].nbytes for pair in pairs if pair is not None for states in pair)


def find_medians(entry: Mapping[str, Any]) -> list[float]:
    """The milliseconds of a pass, by its number of nodes."""
    return list(map(median, entry["samples_ms"]))


def format_passes(report: Mapping[str, Any]) -> str:
    """A table for each context, with a row for each number of nodes; llama.cpp is in the first one."""
    ours, peers = split_engines(report)
    contexts = sorted({entry["context"] for entry in ours})
    parts = []
    for context in contexts:
        columns = [["nodes", *map(str, ours[0]["nodes"]), "floor"]]
        for entry in (entry for entry in ours if entry["context"] == context):
            floor = f"{entry['floor_ms']:.1f}" if "floor_ms" in entry else "-"
            columns.append([f"{entry['dtype']}, batch {entry['batch']}", *_show_times(entry), floor])
            peer = peers.get(entry["dtype"])
            if peer and entry["batch"] == 1 and context == contexts[0]:
                pairs = zip(find_medians(entry), find_medians(peer), strict=True)
                columns.append([LLAMA if peer["context"] else f"{LLAMA}, no context", *_show_times(peer), "-"])
                columns.append([f"{OURS} / {LLAMA}", *(f"{own / other:.2f}" for own, other in pairs), "-"])
        title = f"Milliseconds of a pass after {context} tokens (and relative to one node):"
        parts += [title, to_markdown([*zip(*columns, strict=True)])]
    floor = "floor: the time of reading the weights, and the KV cache, once, at the bandwidth of a copy."
    return "\n\n".join([*parts, floor, *[NOTE] * bool(peers)])


def split_engines(report: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], dict[str, Mapping[str, Any]]]:
    """Draftless' entries, and llama.cpp's by dtype."""
    ours = [entry for entry in report["passes"] if entry["engine"] == OURS]
    return ours, {entry["dtype"]: entry for entry in report["passes"] if entry["engine"] == LLAMA}


def _show_times(entry: Mapping[str, Any]) -> list[str]:
    medians = find_medians(entry)
    return [f"{time:.1f} ({time / medians[0]:.2f}x)" for time in medians]
