"""Finished answers of earlier requests, and the source that drafts from them.

The tokens lie in a ring, answer after answer. Places with the same n-gram are linked from the newest to the oldest, as
in LZ77 compressors, so a token takes 28 bytes and constant time, whatever the size of the store.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import RLock
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from decode import Step, Target
from decode.models.fingerprint import fingerprint_vocabulary
from decode.requests.numbers import check_switches
from heads.atomic_write import write_aside
from proposers.sources.source import Named, Source
from proposers.sources.suffix import rank_copies

GRAM = 3  # tokens that are looked up
LONGEST_MATCH = 16  # longer matches count as this long
OCCURRENCES = 8  # of an n-gram that are compared, newest first
VERSION = "1"
END = -1  # between two answers


class Copy(NamedTuple):
    """A token that followed an occurrence of a text's last tokens, and how many of them are equal there."""

    token: int
    length: int
    place: int


class AnswerStore:
    """Answers of earlier requests, for any number of proposers and threads.

    capacity: tokens that are kept, at 28 bytes each. The oldest answers go first; one that is given again is new again.
    by_prompt: an answer is only found for the prompt that it was given to, but for collisions of hashes, and from its
    first token on: the prompt's last `LONGEST_MATCH` tokens are kept before it. For prompts that come again, as in
    training. Such a store cannot be saved.
    """

    def __init__(self, capacity: int = 1 << 20, *, by_prompt: bool = False) -> None:
        check_switches(by_prompt=by_prompt)
        if capacity < 2 * GRAM:
            raise ValueError(f"capacity is {capacity}; a store keeps at least {2 * GRAM} tokens")
        self.capacity, self.by_prompt = capacity, by_prompt
        self._buckets = 2 * capacity
        self._lock = RLock()
        self._clear()

    def __len__(self) -> int:
        """The number of kept tokens."""
        return sum(map(len, self.answers()))

    def add(self, answer: Sequence[int], prompt: Sequence[int] = ()) -> None:
        """Keep a finished answer; only its end if it is longer than the store."""
        beginning = [*prompt[-LONGEST_MATCH:]] if self.by_prompt else []
        with self._lock:
            self._append([*beginning, *answer], self.key_of(prompt))

    def key_of(self, prompt: Sequence[int]) -> int:
        """What keeps the answers to different prompts apart."""
        return hash(tuple(prompt)) if self.by_prompt else 0

    def find(self, tail: Sequence[int], key: int = 0) -> list[Copy]:
        """What followed the newest occurrences of the last `GRAM` tokens of a text.

        tail: its last tokens. key: of its prompt, see `key_of`.
        """
        found: list[Copy] = []
        if len(tail) < GRAM:
            return found
        backwards = tail[: -LONGEST_MATCH - 1 : -1]
        with self._lock:
            tokens, capacity = self._tokens, self.capacity
            first, place = max(0, self._end - capacity), self._newest[self._bucket(key, tail[-GRAM:])]
            while place >= first and len(found) < OCCURRENCES:
                token, length = tokens[place % capacity], 0
                for expected in backwards:
                    before = place - length - 1
                    if before < first or tokens[before % capacity] != expected:
                        break
                    length += 1
                if length >= GRAM and token != END:
                    found.append(Copy(token, length, place))
                place = self._previous[place % capacity]
        return found

    def answers(self) -> list[list[int]]:
        """The kept answers, oldest first."""
        answers: list[list[int]] = []
        answer: list[int] = []
        with self._lock:
            for place in range(max(0, self._end - self.capacity), self._end):
                token = self._tokens[place % self.capacity]
                if token != END:
                    answer.append(token)
                elif answer:
                    answers.append(answer)
                    answer = []
        return answers

    def save(self, file: Path | str, target: Target | None = None) -> None:
        """Write the answers to a file, which keeps what it had until the new content is complete.

        target: the model whose tokens they are. `load` compares the fingerprint of its vocabulary.

        Raises ValueError for a store by prompt.
        """
        if self.by_prompt:
            raise ValueError("a store by prompt cannot be saved, because it keeps no prompts")
        tokens = torch.tensor([token for answer in self.answers() for token in (*answer, END)], dtype=torch.int32)
        metadata = {"answer_store": VERSION, "sha256": _checksum(tokens), **_describe(target)}
        write_aside(Path(file), lambda aside: aside.write(save({"tokens": tokens}, metadata)))

    def load(self, file: Path | str, target: Target | None = None) -> None:
        """Replace the answers by those of a file.

        target: the model that they are for. Files without a fingerprint, which older versions wrote, are refused only
        if they have a token that the model lacks.

        Raises ValueError for another vocabulary, and for a file that is damaged or no answer store of this version. The
        store then stays as it was.
        """
        rest = iter(_read(Path(file), target))
        with self._lock:
            self._clear()
            for first in rest:
                self._append([first, *iter(lambda: next(rest, END), END)])

    def _clear(self) -> None:
        self._tokens = array("i", bytes(4 * self.capacity))
        # The place after each n-gram's last occurrence before this place, and the newest one by the n-gram's hash.
        self._previous = array("q", [-1]) * self.capacity
        self._newest = array("q", [-1]) * self._buckets
        self._end = 0

    def _append(self, answer: Sequence[int], key: int = 0) -> None:
        answer = answer[-(self.capacity - 1) :]
        for index, token in enumerate([*answer, END]):
            place = self._end
            self._tokens[place % self.capacity] = token
            if index >= GRAM and token != END:
                bucket = self._bucket(key, answer[index - GRAM : index])
                self._previous[place % self.capacity] = self._newest[bucket]
                self._newest[bucket] = place
            else:
                self._previous[place % self.capacity] = -1
            self._end += 1

    def _bucket(self, key: int, gram: Iterable[int]) -> int:
        return hash((key, *gram)) % self._buckets


class StoredSource(Source):
    """Continues each node as earlier answers continued, and keeps the answers of its own streams in the store.

    An answer is kept when its request has left the batch. The last answers of a stream are kept when the next stream
    begins or `keep_answers` is called, as far as they got if the stream was closed early.
    """

    def __init__(self, store: AnswerStore) -> None:
        self.store = store
        # Texts, the lengths of their prompts and the prompts' keys.
        self._answers: dict[int, tuple[Sequence[int], int, int]] = {}

    def observe(self, step: Step) -> None:
        stayed, running = (dict(zip(step.request_ids, each, strict=True)) for each in (step.kept, step.sequences))
        for request_id in [each for each in self._answers if stayed.get(each) is None]:
            if self._answers[request_id][0] is not running.get(request_id):  # else it only joins again
                self._keep(request_id)
        for row in step.joined:
            prompt = step.requests[row].prompt
            self._answers[step.request_ids[row]] = step.sequences[row], len(prompt), self.store.key_of(prompt)

    def keep_answers(self) -> None:
        """Add the answers of a stream that has ended to the store."""
        for request_id in list(self._answers):
            self._keep(request_id)

    def renew(self) -> StoredSource:
        return StoredSource(self.store)

    def start(self, request_id: int) -> tuple[int, tuple[int, ...]]:
        text, _, key = self._answers[request_id]
        return key, tuple(text[-LONGEST_MATCH:])

    def follow(self, state: tuple[int, tuple[int, ...]], token: int) -> tuple[int, tuple[int, ...]]:
        key, tail = state
        return key, (*tail, token)[-LONGEST_MATCH:]

    def continuations(self, state: tuple[int, tuple[int, ...]]) -> list[Named]:
        key, tail = state
        found = self.store.find(tail, key)
        copies: dict[int, tuple[int, int, int]] = {}
        for copy in found:
            _, count, latest = copies.get(copy.token, (0, 0, 0))
            copies[copy.token] = copy.token, count + 1, max(latest, copy.place)
        return rank_copies(max((copy.length for copy in found), default=0), copies.values())

    def _keep(self, request_id: int) -> None:
        text, prompt, _ = self._answers.pop(request_id)
        self.store.add(text[prompt:], text[:prompt])


def _describe(target: Target | None) -> dict[str, str]:
    """What a file carries to be recognised; nothing without a tokenizer."""
    if target is None or target.tokenizer is None:
        return {}
    return {"vocabulary": fingerprint_vocabulary(target.tokenizer)}


def _read(file: Path, target: Target | None) -> list[int]:
    """A file's tokens. Raises ValueError as `AnswerStore.load` does: tokens of another tokenizer mean nothing here."""
    try:
        with safe_open(file, "pt") as stored:
            metadata, tensor = stored.metadata() or {}, stored.get_tensor("tokens")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no answer store, or damaged: {error}") from error
    if metadata.get("answer_store") != VERSION:
        raise ValueError(f"{file} is an answer store of version {metadata.get('answer_store')}; expected {VERSION}")
    if metadata.get("sha256") != _checksum(tensor):
        raise ValueError(f"{file} is damaged: its checksum is wrong")
    tokens: list[int] = tensor.tolist()
    written, ours = metadata.get("vocabulary"), _describe(target).get("vocabulary")
    reason = None
    if None not in (written, ours) and written != ours:
        reason = f"its vocabulary's fingerprint is {written}, the model's is {ours}"
    elif target is not None and max(tokens, default=END) >= target.vocabulary:
        reason = f"it has token {max(tokens)}, and the model has {target.vocabulary} tokens"
    if reason is not None:
        raise ValueError(f"{file} has answers of another tokenizer ({reason}); name another file to begin a new store")
    return tokens


def _checksum(tokens: torch.Tensor) -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
