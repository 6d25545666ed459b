"""What a training will take, before it is begun."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import nn

from training.batches import padding_share, plan_batches
from training.data import Dataset
from training.lessons import Lessons
from training.trainer import Schedule

TRIALS = 3


def print_plan(objective: nn.Module, dataset: Dataset, schedule: Schedule, lessons: Lessons) -> None:
    """Print parameters, tokens, memory and expected time, the last from a few batches; no weight is changed."""
    lengths = [len(example.tokens) for example in dataset.examples]
    batches = plan_batches(lengths, schedule.batch_tokens, schedule.seed, epoch=0)
    batch_count = len(batches) * schedule.epochs
    if schedule.max_steps is not None:
        batch_count = min(batch_count, schedule.max_steps * schedule.accumulate)
    parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    count = sum(parameter.numel() for parameter in parameters)
    target_seconds, head_seconds, tokens = _measure(objective, dataset, batches, lessons)
    rows = {
        "parameters": f"{count:,} ({2 * count / 1e6:.1f} MB as saved, in bfloat16)",
        "examples": f"{len(lengths):,}; {dataset.dropped:,} more were loops, {len(dataset.prompts)} prompts held out",
        "answer tokens": f"{dataset.answer_tokens:,} of {sum(lengths):,}, seen {schedule.epochs} times",
        "steps": f"{-(-batch_count // schedule.accumulate):,}, padding {padding_share(lengths, batches):.1%}",
        "memory": f"{16 * count / 1e6:,.0f} MB for weights, gradients and optimizer, besides the target",
        "speed": f"{tokens / (target_seconds + head_seconds):,.0f} answer tokens/s, of the time "
        f"{target_seconds / (target_seconds + head_seconds):.0%} in the target",
        "time": _hours(batch_count * (target_seconds + head_seconds) / TRIALS) + ", validations aside",
        "with features cached": _hours(batch_count * head_seconds / TRIALS),
    }
    for name, value in rows.items():
        print(f"{name:21} {value}")


def _measure(
    objective: nn.Module, dataset: Dataset, batches: list[list[int]], lessons: Lessons
) -> tuple[float, float, int]:
    """Seconds in the target and in the head, and answer tokens, of a few batches; one before them warms up."""
    target_seconds = head_seconds = 0.0
    tokens = 0
    dtype = lessons.teacher.target.dtype
    device = lessons.teacher.target.device
    objective.to(device)
    for trial, numbers in enumerate([batches[0], *batches[:TRIALS]]):
        begun = perf_counter()
        lesson = lessons(numbers)
        between = perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
            objective(lesson).total.backward()
        objective.zero_grad(set_to_none=True)
        if trial:
            target_seconds += between - begun
            head_seconds += perf_counter() - between
            tokens += sum(dataset.examples[number].answer_tokens for number in numbers)
    return target_seconds, head_seconds, tokens


def _hours(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(1, minutes)} min"
