"""What training measures: its size and expected time, tau in a validation, a picture of loss and tau."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from decode import Target, stream
from decode.devices.backend import find_backend
from decode.requests.answer import Stats
from draftless_commands.shared.results import save_figure
from draftless_commands.shared.terminal import list_answers
from draftless_commands.shared.worth import DRAFT_WIDTH, NODES, count
from heads.vocabulary import VocabularyHead
from proposers import DraftProposer
from proposers.options import find_proposer
from proposers.tree_proposer import TreeProposer
from training.checkpoint import read_metrics
from training.data import Dataset
from training.draft_model import DraftModel
from training.feature_cache import BatchLoader
from training.joint import JointObjective
from training.trainer import Schedule, Validation

TRIALS = 3  # batches to measure for a plan
NEW_TOKENS, BATCH = 64, 16  # in validations; BATCH: prompts at a time
DEPTH = 6  # of draft models, which have none of their own


def print_plan(
    objective: nn.Module, dataset: Dataset, schedule: Schedule, load_batch: BatchLoader, processes: int = 1
) -> None:
    """Print parameters, tokens, memory and time, measured on one process's part of a few batches.

    No weight is changed.
    """
    examples = dataset.examples
    lengths = [len(example.tokens) for example in examples]
    batches = schedule.plan(lengths)
    measured = [batch[::processes] for batch in batches[:TRIALS]]
    count = sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)
    target_seconds, head_seconds = _measure(objective, measured, load_batch)
    seconds = target_seconds + head_seconds
    tokens, seen = (
        sum(examples[number].answer_tokens for batch in part for number in batch) for part in (measured, batches)
    )
    # The optimizer will need at most 8 bytes a weight: AdamW keeps two numbers for each, Muon one.
    memory = _peak_memory(load_batch.teacher.target.device) + 8 * count
    rows = {
        "parameters": f"{count:,} ({2 * count / 1e6:.1f} MB as saved, in bfloat16)",
        "examples": f"{len(lengths):,}; {dataset.dropped:,} more were loops, {dataset.too_long:,} too long, "
        f"{dataset.held_out} prompts held out",
        "answer tokens": f"{dataset.answer_tokens:,} of {sum(lengths):,}; {seen:,} are seen in all",
        "steps": f"{len(batches):,}",
        "memory": f"{memory / 2**30:.2f} GiB, measured on {len(measured)} batches",
        "speed": f"{processes * tokens / seconds:,.0f} answer tokens/s; "
        f"{target_seconds / seconds:.0%} of the time is the model's",
        "time": _format_time(seconds * len(batches) / len(measured)) + ", without validations",
        "with features cached": _format_time(head_seconds * len(batches) / len(measured)),
    }
    if isinstance(objective, JointObjective):  # whose features change
        del rows["with features cached"]
    print("\n".join(f"{name:21} {value}" for name, value in rows.items()), flush=True)


def validate(target: Target, head: VocabularyHead | DraftModel, prompts: Sequence[Sequence[int]]) -> Validation:
    """Decode the prompts greedily with trees of `NODES` nodes."""
    proposer: TreeProposer
    if isinstance(head, DraftModel):
        draft = Target(head.model)
        proposer = DraftProposer(draft, depth=DEPTH, width=1 if draft.is_recurrent else DRAFT_WIDTH, nodes=NODES)
    else:
        proposer = find_proposer(head.kind)(head, nodes=NODES)
    limits = {"batch_size": BATCH, "max_new_tokens": NEW_TOKENS, "nodes": NODES}
    answers, stats = list_answers(stream(target, prompts, proposer, text=False, **limits)), Stats()
    for answer in answers:
        stats.add(answer.stats)
    reached = [stats.steps - len(answers), *stats.accepted_by_depth]  # the prefill step drafts nothing
    return Validation(stats.tau, [deep / above for above, deep in pairwise(reached) if above])


def describe_validation(prompts: Sequence[Sequence[int]]) -> str:
    """What the taus of a training rest on."""
    held_out = count(len(prompts), "held-out prompt")
    return f"tau is that of trees of {NODES} nodes, on {held_out} with at most {NEW_TOKENS} new tokens each"


def plot_training(folder: Path, file: Path) -> None:
    """Draw loss and tau of the folder's metrics over the answer tokens seen."""
    rows = read_metrics(folder)
    losses, taus = ([(row["tokens"] / 1e6, row[name]) for row in rows if name in row] for name in ("loss", "tau"))
    with save_figure(file, 7, 4, 10) as figure:
        left = figure.subplots()
        left.plot(*zip(*losses, strict=True), color="0.7", linewidth=1)
        left.set(xlabel="million answer tokens seen", ylabel="loss (grey)")
        right = left.twinx()
        right.plot(*zip(*taus, strict=True), color="tab:green", marker="o", markersize=3)
        right.set_ylabel(f"tau on held-out prompts, {NODES} nodes (green)")


def _measure(objective: nn.Module, batches: Sequence[Sequence[int]], load_batch: BatchLoader) -> tuple[float, float]:
    """Seconds in the target and in the head for these batches, after a warm-up batch.

    A training that follows draws the same random numbers as without.
    """
    target_seconds = head_seconds = 0.0
    target = load_batch.teacher.target
    objective.to(target.device)
    for trial, numbers in enumerate([batches[0], *batches]):  # the first is a warm-up
        devices = [target.device] if target.backend.waits else []
        autocast = torch.autocast(target.device.type, target.dtype, enabled=target.dtype == torch.bfloat16)
        with torch.random.fork_rng(devices):
            started = perf_counter()
            batch = load_batch(numbers)
            float(batch.probabilities.sum())  # synchronizes with a GPU
            between = perf_counter()
            with autocast:
                loss = objective(batch).total
        loss.backward()
        float(loss.detach())
        objective.zero_grad(set_to_none=True)
        if trial:
            target_seconds += between - started
            head_seconds += perf_counter() - between
    return target_seconds, head_seconds


def _peak_memory(device: torch.device) -> int:
    """The most bytes in use so far: target, weights, gradients and activations."""
    if find_backend(device).waits:
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _format_time(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
