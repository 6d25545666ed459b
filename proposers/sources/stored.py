"""The tokens that followed the same last tokens in finished answers of other requests."""

from __future__ import annotations

from collections.abc import Sequence

from decode import Step
from proposers.sources.answer_store import LONGEST, AnswerStore
from proposers.sources.source import Named, Source
from proposers.sources.suffix import rank_copies

IN_USE = 8  # equal tokens from which a stored answer counts as used


class StoredSource(Source):
    """Continues each node as earlier answers continued, and keeps the answers of its own streams in the store.

    An answer is kept when its request leaves the batch, the last ones of a stream when the next stream begins or
    `keep_answers` is called. Of a stream that was closed early, they are as far as they got.
    """

    def __init__(self, store: AnswerStore) -> None:
        self.store = store
        self._answers: dict[int, tuple[Sequence[int], int]] = {}  # texts, and the lengths of their prompts

    def observe(self, step: Step) -> None:
        if step.is_prefill:
            self.keep_answers()
            lengths = map(len, step.committed)
            texts = zip(step.sequences, lengths, strict=True)
            self._answers = dict(zip(step.request_ids, texts, strict=True))
        for request_id in self._answers.keys() - set(step.request_ids):
            self._keep(request_id)

    def keep_answers(self) -> None:
        """Add the answers of a stream that has ended to the store."""
        for request_id in list(self._answers):
            self._keep(request_id)

    def renew(self) -> StoredSource:
        return StoredSource(self.store)

    def start(self, request_id: int) -> tuple[int, ...]:
        tail = tuple(self._answers[request_id][0][-LONGEST:])
        longest = max(self.store.find(tail), key=lambda copy: copy.length, default=None)
        if longest is not None and longest.length >= IN_USE:
            self.store.use(longest.place)
        return tail

    def follow(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)[-LONGEST:]

    def continuations(self, state: tuple[int, ...]) -> list[Named]:
        found = self.store.find(state)
        copies: dict[int, tuple[int, int, int]] = {}
        for copy in found:
            _, count, latest = copies.get(copy.token, (0, 0, 0))
            copies[copy.token] = copy.token, count + 1, max(latest, copy.place)
        return rank_copies(max((copy.length for copy in found), default=0), copies.values())

    def _keep(self, request_id: int) -> None:
        text, prompt = self._answers.pop(request_id)
        self.store.add(text[prompt:])
