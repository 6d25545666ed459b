"""What a training will take, before it is begun."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from time import perf_counter

import torch
from torch import nn

from training.batches import padding_share
from training.data import Dataset
from training.lessons import Lessons
from training.schedule import Schedule

TRIALS = 3


def print_plan(objective: nn.Module, dataset: Dataset, schedule: Schedule, lessons: Lessons) -> None:
    """Print parameters, tokens, memory and expected time, the last two from a few batches; no weight is changed."""
    lengths = [len(example.tokens) for example in dataset.examples]
    steps = list(schedule.plan(lengths))
    batches = [batch for step in steps for batch in step]
    count = sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)
    trials = batches[:TRIALS]
    target_seconds, head_seconds = _measure(objective, trials, lessons)
    tokens, seen = (
        sum(dataset.examples[number].answer_tokens for batch in chosen for number in batch)
        for chosen in (trials, batches)
    )
    share = len(batches) / len(trials)
    rows = {
        "parameters": f"{count:,} ({2 * count / 1e6:.1f} MB as saved, in bfloat16)",
        "examples": f"{len(lengths):,}; {dataset.dropped:,} more were loops, {dataset.too_long:,} too long, "
        f"{len(dataset.prompts)} prompts held out",
        "answer tokens": f"{dataset.answer_tokens:,} of {sum(lengths):,}; {seen:,} are seen in all",
        "steps": f"{len(steps):,}, padding {padding_share(lengths, batches):.1%}",
        "memory": f"{(_peak_memory(lessons.teacher.target.device) + 8 * count) / 2**30:.2f} GiB, by those few batches",
        "speed": f"{tokens / (target_seconds + head_seconds):,.0f} answer tokens/s, of the time "
        f"{target_seconds / (target_seconds + head_seconds):.0%} in the target",
        "time": _hours(share * (target_seconds + head_seconds)) + ", validations aside",
        "with features cached": _hours(share * head_seconds),
    }
    for name, value in rows.items():
        print(f"{name:21} {value}")


def _measure(objective: nn.Module, batches: Sequence[Sequence[int]], lessons: Lessons) -> tuple[float, float]:
    """Seconds in the target and in the head for these batches; one before them warms up."""
    target_seconds = head_seconds = 0.0
    target = lessons.teacher.target
    objective.to(target.device)
    for trial, numbers in enumerate([batches[0], *batches]):
        begun = perf_counter()
        lesson = lessons(numbers)
        float(lesson.chances.sum())  # waits for a GPU
        between = perf_counter()
        with torch.autocast(target.device.type, target.dtype, enabled=target.dtype == torch.bfloat16):
            loss = objective(lesson).total
        loss.backward()
        float(loss.detach())
        objective.zero_grad(set_to_none=True)
        if trial:
            target_seconds += between - begun
            head_seconds += perf_counter() - between
    return target_seconds, head_seconds


def _peak_memory(device: torch.device) -> int:
    """The most bytes that were in use so far: target, weights, gradients and activations, but no optimizer yet.

    That will take 8 bytes a weight at most: AdamW has two numbers for each, Muon one.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _hours(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(1, minutes)} min"
