"""Answering jobs in large batches, turn after turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from decode import Sampling, Target, stream
from scripts.distillation.jobs import Job
from training.data import has_looped

WINDOW = 8  # batches that are sorted by length: the KV cache is as wide as its longest row
TURNS = 4  # batches of conversations in one group: a kill loses these


def group_jobs(jobs: Sequence[Job], batch_size: int) -> Iterator[list[Job]]:
    """The jobs in groups to be answered together: of one temperature, and not too many conversations."""
    for temperature in sorted({job.temperature for job in jobs}):
        same = [job for job in jobs if job.temperature == temperature]
        single, several = ([job for job in same if bool(job.later) == later] for later in (False, True))
        size = TURNS * batch_size
        groups = [single, *(several[begin : begin + size] for begin in range(0, len(several), size))]
        yield from (group for group in groups if group)


def answer_jobs(
    asked: list[Job], target: Target, batch_size: int, max_new_tokens: int, seed: int
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Answer a group of jobs. Yields numbers of new tokens, each with the row that they complete, if any."""
    while asked:
        prompts = {job.number: job.encode(target.tokenizer) for job in asked}
        yield from ((0, job.drop("context")) for job in asked if len(prompts[job.number]) >= target.context)
        waiting = {job.number: job for job in asked if len(prompts[job.number]) < target.context}
        order = sort_by_length({number: len(prompts[number]) for number in waiting}, WINDOW * batch_size)

        def ends_in_loop(number: int, tokens: list[int], prompts: dict[int, list[int]] = prompts) -> bool:
            return has_looped(tokens[len(prompts[number]) :])

        chunks = stream(
            target,
            [prompts[number] for number in order],
            batch_size=batch_size,
            request_ids=order,
            sampling=Sampling(temperature=asked[0].temperature, seed=seed),
            max_new_tokens=max_new_tokens,
            criterion=ends_in_loop,
            text=False,
        )
        asked = []
        for chunk in chunks:
            job = waiting[chunk.request_id]
            row = job.take(chunk.answer) if chunk.answer is not None else None
            if chunk.answer is not None and row is None:
                asked.append(job)
            yield len(chunk.tokens), row


def sort_by_length(lengths: dict[int, int], window: int) -> list[int]:
    """The keys sorted by value within windows, alternately rising and falling, so that lengths change slowly."""
    keys, order = list(lengths), list[int]()
    for begin in range(0, len(keys), window):
        part = sorted(keys[begin : begin + window], key=lambda key: lengths[key])
        order += reversed(part) if begin // window % 2 else part
    return order
