"""Jobs: what to ask the model, from files of prompts; their answers in large batches; the rows of training data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode import Answer, Sampling, Target, stream
from decode.text import Tokenizer, encode
from scripts.shared.prompts import check_prompt, check_turns, read_rows
from training.data import has_looped

KINDS = ("prompt", "turns", "messages")
WINDOW = 8  # batches that are sorted by length: the KV cache is as wide as its longest row
TURNS = 4  # batches of conversations in one group: a kill loses these
ROLES = ("system", "user", "assistant")


@dataclass
class Job:
    """One row of a prompt file, and the conversation so far."""

    number: int  # its place among all prompts; the request id that keys its noise
    id: int | str
    source: str
    temperature: float
    messages: list[dict[str, str]]  # the last one is to be answered
    later: list[str]  # questions to ask after that
    single: bool  # a prompt and its response, not a conversation
    tokens: int = 0  # of the answers so far

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """The tokens of the conversation to be answered."""
        return encode(self.messages[0]["content"] if self.single else self.messages, tokenizer, None)

    def take(self, answer: Answer) -> dict[str, Any] | None:
        """Add an answer. Returns the finished row, or None if another question follows."""
        if answer.finish == "criterion":
            return self.drop("loop")
        finished = answer.finish == "eos"
        if not (finished or answer.text.strip()):
            return self.drop("empty")
        self.tokens += len(answer.tokens)
        self.messages.append({"role": "assistant", "content": answer.text})
        if finished and self.later:  # a cut-off answer ends the conversation
            self.messages.append({"role": "user", "content": self.later.pop(0)})
            return None
        return self.row() | {"finished": finished, "response_tokens": self.tokens}

    def drop(self, reason: str) -> dict[str, Any]:
        """The row without the current question: the conversation before it, if there is one, and the reason."""
        if not self.tokens:
            return self.row() | {"dropped": reason}
        self.messages.pop()
        return self.row() | {"finished": True, "response_tokens": self.tokens, "cut": reason}

    def row(self) -> dict[str, Any]:
        """The conversation so far, in the format of the file."""
        row = {"id": self.id, "source": self.source, "temperature": self.temperature}
        if not self.single:
            return row | {"messages": self.messages}
        texts = [message["content"] for message in self.messages]
        return row | dict(zip(("prompt", "response"), texts, strict=False))


def read_jobs(paths: Sequence[str], temperatures: Sequence[float]) -> list[Job]:
    """The jobs of all files, in order. Raises ValueError, naming the line, if a row is not valid."""
    jobs: list[Job] = []
    places: dict[int | str, str] = {}
    for path in paths:
        for line, row in read_rows(path):
            place = f"{path}, line {line}"
            stem = Path(path).stem
            default_id = line if len(paths) == 1 else f"{stem}:{line}"
            job = _make_job(len(jobs), {"id": default_id, "source": stem, **row}, temperatures, place)
            if job.id in places:
                raise ValueError(f"{place} has the id {json.dumps(job.id)} of {places[job.id]}; give each row its own")
            places[job.id] = place
            jobs.append(job)
    return jobs


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
        if not waiting:
            return
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


def check_temperature(value: Any, place: str) -> float:
    """The temperature. Raises ValueError, naming the place, unless it is 0 or a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{place}: a temperature is 0 (greedy) or a positive number, not {json.dumps(value):.40}")
    return float(value)


def _make_job(number: int, row: dict[str, Any], temperatures: Sequence[float], place: str) -> Job:
    if sum(kind in row for kind in KINDS) != 1:
        raise ValueError(f'{place}: a line is a JSON object with one of "prompt", "turns" and "messages"')
    if isinstance(row["id"], bool) or not isinstance(row["id"], int | str):
        raise ValueError(f"{place}: an id is a whole number or a text, not {json.dumps(row['id']):.40}")
    if "messages" in row:
        messages, later = _check_messages(row["messages"], place), list[str]()
    else:
        first, *later = check_turns(row, place)
        messages = [{"role": "user", "content": first}]
    # Chosen by the id: the same in every run, whatever else is asked.
    chosen = int.from_bytes(hashlib.sha256(json.dumps(row["id"]).encode()).digest()) % len(temperatures)
    temperature = check_temperature(row.get("temperature", temperatures[chosen]), place)
    return Job(number, row["id"], str(row["source"]), temperature, messages, later, "prompt" in row)


def _check_messages(messages: Any, place: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f'{place}: "messages" is a list of objects with "role" and "content"')
    roles = [message.get("role") for message in messages]
    if not all(role in ROLES for role in roles) or roles[-1] != "user":
        raise ValueError(f"{place}: messages are by {', '.join(ROLES)}, and the last one, to be answered, by user")
    return [{"role": message["role"], "content": check_prompt(message.get("content"), place)} for message in messages]
