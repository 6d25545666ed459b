"""Jobs: what to ask the model, from files of prompts; its answers; the rows of training data."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode import Answer, Engine, Sampling
from decode.devices.user_cache import print_notice_once
from decode.requests.detokenizer import decode
from draftless_commands.shared.prompts import read_conversations
from training.conversations import TEMPLATE_KEYS, Conversation
from training.data import TOKENS, VOCABULARY, has_looped
from training.rendering import Renderer, Texts, add_turn

AHEAD = 2  # batches of questions that the engine is given: one is answered, one waits


@dataclass
class Job:
    """One row of a prompt file, and the conversation so far."""

    number: int  # its place among all prompts; the request id that keys its noise
    id: int | str
    source: str
    temperature: float
    conversation: Conversation
    tokens: int = 0  # of the answers so far
    texts: Texts = field(default_factory=list)  # the token ids of prompts and answers so far

    def take(self, answer: Answer, renderer: Renderer) -> dict[str, Any] | None:
        """Add an answer. Returns the finished row, or None if another question follows.

        Raises ValueError for one that failed, unless its logits are no numbers: it can be asked again.
        """
        if answer.finish == "error":
            if not isinstance(answer.exception, FloatingPointError):
                raise ValueError(f"{answer.error}; the answers so far are kept") from answer.exception
            return self.drop("nan", renderer)
        if answer.finish == "criterion":
            return self.drop("loop", renderer)
        finished = answer.finish == "eos"
        if not (finished or answer.text.strip()):
            return self.drop("empty", renderer)
        self.tokens += len(answer.tokens)
        add_turn(self.texts, answer.prompt, answer.tokens)
        # Special tokens such as those of tool calls are part of the answer, its end token is not.
        text = decode(answer.tokens[:-1] if finished else answer.tokens, renderer.tokenizer, special=True)
        self.conversation.add(text, go_on=finished)  # a cut-off answer ends the conversation
        return None if self.conversation.is_open else self._end(finished, renderer)

    def drop(self, reason: str, renderer: Renderer) -> dict[str, Any]:
        """The row without the current question: the conversation before it, if there is one, and the reason."""
        if not self.tokens:
            return self.row() | {"dropped": reason}
        self.conversation.messages.pop()
        return self._end(True, renderer) | {"cut": reason}

    def row(self) -> dict[str, Any]:
        """The conversation so far, in the format of the file."""
        row = {"id": self.id, "source": self.source, "temperature": self.temperature}
        asked = self.conversation
        row |= {name: asked.options[name] for name in TEMPLATE_KEYS if name in asked.options}
        if others := {name: value for name, value in asked.options.items() if name not in TEMPLATE_KEYS}:
            row["chat_template_kwargs"] = others
        if "prompt" not in asked.fields or asked.messages[0] != {"role": "user", "content": asked.fields["prompt"]}:
            return row | {"messages": asked.messages}
        texts = [message["content"] for message in asked.messages]
        return row | dict(zip(("prompt", "response"), texts, strict=False))

    def _end(self, finished: bool, renderer: Renderer) -> dict[str, Any]:
        counts = {"finished": finished, "response_tokens": self.tokens}
        return self.row() | counts | {VOCABULARY: renderer.vocabulary, TOKENS: self.texts}


def read_jobs(paths: Sequence[str], temperatures: Sequence[float]) -> list[Job]:
    """The jobs of all files, in order. Default ids are line numbers, of several files after the file's name.

    Raises ValueError, naming the line, if a row is not valid.
    """
    jobs: list[Job] = []
    places: dict[int | str, str] = {}
    for stem, conversation in [(Path(path).stem, each) for path in paths for each in read_conversations(path)]:
        place, row = conversation.place, conversation.fields
        own = row.get("id", f"{stem}:{conversation.line}" if len(paths) > 1 else conversation.line)
        if isinstance(own, bool) or not isinstance(own, int | str):
            raise ValueError(f"{place}: an id is a whole number or a text, not {json.dumps(own):.40}")
        if own in places:
            raise ValueError(f"{place} has the id {json.dumps(own)} of {places[own]}; give each row its own")
        places[own] = place
        # Chosen by the id: the same in every run, whatever else is asked.
        chosen = int.from_bytes(hashlib.sha256(json.dumps(own).encode()).digest()) % len(temperatures)
        temperature = check_temperature(row.get("temperature", temperatures[chosen]), place)
        jobs.append(Job(len(jobs), own, str(row.get("source", stem)), temperature, conversation))
    return jobs


def answer_jobs(
    jobs: Sequence[Job], engine: Engine, renderer: Renderer, max_new_tokens: int, seed: int
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Answer all jobs. Yields numbers of new tokens, each with the row that they complete, if any.

    The next question of a conversation is asked as soon as the one before is answered.
    """
    waiting, asked = deque(jobs), dict[int, Job]()
    while waiting or asked:
        while waiting and len(asked) < AHEAD * engine.rows:
            job = waiting.popleft()
            reason = _ask(job, engine, renderer, max_new_tokens, seed)
            if reason is None:
                asked[job.number] = job
            else:
                yield 0, job.drop(reason, renderer)
        for chunk in engine.step():
            row = None
            if chunk.answer is not None:
                job = asked.pop(chunk.request_id)
                row = job.take(chunk.answer, renderer)
                if row is None:
                    waiting.appendleft(job)
            yield len(chunk.tokens), row


def _ask(job: Job, engine: Engine, renderer: Renderer, max_new_tokens: int, seed: int) -> str | None:
    """Add a job's next question to the engine. Returns the reason if that cannot be done."""
    try:
        prompt = renderer.encode(job.conversation)
    except ValueError as error:  # it may refuse what the model wrote, or a role
        print_notice_once("template", f"{error}; such conversations end before that turn")
        return "template"
    if len(prompt) >= engine.target.context:
        return "context"
    sampling = Sampling(temperature=job.temperature, seed=seed)
    limits: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "criterion": lambda _, tokens: has_looped(tokens[len(prompt) :]),
    }
    engine.add(prompt, request_id=job.number, sampling=sampling, text=False, **limits)
    return None


def check_temperature(value: Any, place: str) -> float:
    """The temperature. Raises ValueError, naming the place, unless `Sampling` takes it."""
    try:
        return Sampling(temperature=value).temperature
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {error}") from error
