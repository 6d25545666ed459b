"""What is asked and what was answered: rows of prompts in, rows of training data out."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode import Answer
from decode.text import Tokenizer, encode
from heads.atomic_write import write_aside
from scripts.shared.prompts import check_prompt, check_turns, read_rows

KINDS = ("prompt", "turns", "messages")
ROLES = ("system", "user", "assistant")


@dataclass
class Job:
    """One row of the prompts: what is asked, and what was said so far."""

    number: int  # its place among all prompts, which keys its noise
    id: int | str
    source: str
    temperature: float
    messages: list[dict[str, str]]  # the last one is a question
    later: list[str]  # questions that are asked once that one is answered
    alone: bool  # a prompt and its response, and no conversation
    tokens: int = 0  # of the answers so far

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """The tokens of what is to be answered next."""
        return encode(self.messages[0]["content"] if self.alone else self.messages, tokenizer, None)

    def take(self, answer: Answer) -> dict[str, Any] | None:
        """Add an answer. Returns the row for the file, or None where another question follows."""
        if answer.finish == "criterion":
            return self.drop("loop")
        finished = answer.finish == "eos"
        if not (finished or answer.text.strip()):
            return self.drop("empty")
        self.tokens += len(answer.tokens)
        self.messages.append({"role": "assistant", "content": answer.text})
        if finished and self.later:  # nobody would ask on in the middle of an answer
            self.messages.append({"role": "user", "content": self.later.pop(0)})
            return None
        return self.row() | {"finished": finished, "response_tokens": self.tokens}

    def drop(self, reason: str) -> dict[str, Any]:
        """The row where an answer cannot be had: the conversation before it, or that there is none; and why."""
        if not self.tokens:
            return self.row() | {"dropped": reason}
        self.messages.pop()  # the question
        return self.row() | {"finished": True, "response_tokens": self.tokens, "cut": reason}

    def row(self) -> dict[str, Any]:
        """What was said so far, as it is written."""
        row = {"id": self.id, "source": self.source, "temperature": self.temperature}
        if not self.alone:
            return row | {"messages": self.messages}
        texts = [message["content"] for message in self.messages]
        return row | dict(zip(("prompt", "response"), texts, strict=False))


def read_jobs(paths: Sequence[str], temperatures: Sequence[float]) -> list[Job]:
    """The jobs of all files, in order. Raises ValueError, naming the line, for rows that are none."""
    jobs: list[Job] = []
    places: dict[int | str, str] = {}
    for path in paths:
        for line, row in read_rows(path):
            place = f"{path}, line {line}"
            stem = Path(path).stem
            own = line if len(paths) == 1 else f"{stem}:{line}"
            job = _make_job(len(jobs), {"id": own, "source": stem, **row}, temperatures, place)
            if job.id in places:
                raise ValueError(f"{place} has the id {json.dumps(job.id)} of {places[job.id]}; give each row its own")
            places[job.id] = place
            jobs.append(job)
    return jobs


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
    # The same one at every run, whatever else is asked.
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


def check_temperature(value: Any, place: str) -> float:
    """The number itself. Raises ValueError, naming its place, unless it is one that can be sampled at."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{place}: a temperature is 0 (greedy) or a positive number, not {json.dumps(value):.40}")
    return float(value)


class Answers:
    """The file of answers: whole lines only, so that a run that was killed goes on behind the last one.

    settings: what answers depend on; it is kept beside the file. Raises ValueError where the file was made with other
    settings, or is not such a file.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.beside = path.with_name(path.name + ".settings.json")
        self.whole = 0  # bytes of whole lines
        self.done: dict[int | str, dict[str, Any]] = {}  # rows by their ids
        self.tokens = 0  # of all answers
        self.dropped = Counter[str]()
        self.cut = 0  # conversations of which a later answer was dropped
        if path.exists() and path.stat().st_size:
            self._read()

    def begin(self) -> None:
        """Make the file ready to be written behind its last whole line."""
        content = json.dumps(self.settings, indent=2, allow_nan=False) + "\n"
        write_aside(self.beside, lambda file: file.write(content.encode()))
        with self.path.open("ab") as file:
            file.truncate(self.whole)

    def append(self, row: dict[str, Any]) -> None:
        """Add a line, at once and whole: what a kill leaves of a half one is cut off by the next run."""
        with self.path.open("ab") as file:
            file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._count(row)

    def left(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs that have no line yet. Raises ValueError where a line answers another prompt with the same id."""
        for job in jobs:
            row = self.done.get(job.id, job.row())
            said = row.get("messages") or [{"role": "user", "content": row.get("prompt")}]
            if said[: len(job.messages)] != job.messages:
                raise ValueError(f"{self.path} has another prompt with the id {json.dumps(job.id)}; give another --out")
        return [job for job in jobs if job.id not in self.done]

    def _read(self) -> None:
        raw = self.path.read_bytes()
        self.whole = raw.rfind(b"\n") + 1
        if not self.beside.exists():
            raise ValueError(f"{self.path} has no {self.beside.name} beside it, which says how it was made")
        try:
            before = json.loads(self.beside.read_bytes())
            changed = [
                f"{name} {json.dumps(before[name])}, not {json.dumps(now)}"
                for name, now in self.settings.items()
                if before[name] != now
            ]
            for line in raw[: self.whole].splitlines():
                self._count(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} or {self.beside.name} is damaged ({error}); remove both") from error
        if changed:
            raise ValueError(
                f"{self.path} was begun with {' and '.join(changed)}; go on with the same, or give another --out"
            )

    def _count(self, row: dict[str, Any]) -> None:
        self.done[row["id"]] = row
        if "dropped" in row:
            self.dropped[row["dropped"]] += 1
        else:
            self.tokens += row["response_tokens"]
            self.cut += "cut" in row
