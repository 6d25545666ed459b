"""Requests: a prompt, its settings, and its answer while it grows."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from decode.grammars.grammar import AnyGrammar, make_matchers
from decode.grammars.matcher import Constraint
from decode.models.facts import MAX_TREE_SLOTS
from decode.requests.answer import NEW_TOKENS, NO_NUMBERS, Answer, Chunk, Limits, LogProbs, Stats
from decode.requests.detokenizer import TextStream, decode, find_special, read_stop
from decode.requests.numbers import as_whole_numbers, check_switches, read_count, read_whole
from decode.requests.text import Prompt, Tokenizer, encode
from decode.target import Target
from decode.trees.processors import RequestProcessors, copy_processor
from decode.trees.sampling import NO_TOKEN, Sampling

NODES = 64  # of a tree at most, by default


@dataclass(eq=False)
class Request:
    """A prompt, its settings and its answer so far. Iterating it yields the chunks of its answer, each once.

    Whoever iterates it drives the engine that it was added to, with all other requests. `async for` does so in another
    thread.

    request_id: its number. noise_id: what keys its noise; -1: its number.
    prompt: its token ids. sequence: prompt and answer so far.
    limits: where its answer ends. context: how many tokens the model has room for.
    text: makes text of new tokens; None makes none. sampling: how its tokens are chosen.
    nodes: of its trees at most, root included; 1: no draft tokens.
    log_probs: how many of the most likely tokens are told with their log-probabilities; None: no log-probabilities.
    log_probs_at: the temperature of these.
    constraint: what its answer must look like; None: anything.
    follow_weights: go on under new weights if the model's change; otherwise it ends with "error".
    stats: counts and times so far. finish, exception: as in `Answer`; None while it goes on.
    is_cancelled: it ends with the next step. answer: the whole answer, once it is finished. engine: it was added to it.
    call: the `generate` call of transformers that it belongs to (`decode.hf.call`).
    """

    request_id: int
    prompt: list[int]
    limits: Limits
    context: int
    text: TextStream | None = None
    sampling: Sampling = Sampling()  # noqa: RUF009 - it is frozen
    nodes: int = MAX_TREE_SLOTS
    log_probs: int | None = None
    log_probs_at: float = 1.0
    constraint: Constraint | None = None
    follow_weights: bool = False
    sequence: list[int] = field(init=False)
    stats: Stats = field(default_factory=Stats)
    finish: str | None = None
    exception: Exception | None = None
    is_cancelled: bool = False
    answer: Answer | None = None
    engine: Any = None
    call: Any = None
    noise_id: int = -1

    def __post_init__(self) -> None:
        self.noise_id = self.request_id if self.noise_id < 0 else self.noise_id
        self.sequence = list(self.prompt)
        self._pieces: list[str] = []
        self._log_probs: list[LogProbs] = []
        self._chunks = deque[Chunk]()

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            is_finished = self.answer is not None  # before the chunks are taken: another thread may add the last one
            while self._chunks:
                yield self._chunks.popleft()
            if is_finished:
                return
            self.engine.drive(self)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while True:
            is_finished = self.answer is not None
            while self._chunks:
                yield self._chunks.popleft()
            if is_finished:
                return
            await self.engine.step_async()

    @property
    def is_waited_for(self) -> bool:
        """Whether whoever iterates it has all its chunks, and more are to come."""
        return not self._chunks and self.answer is None

    @property
    def room(self) -> int:
        """How many more tokens it may get."""
        answered = len(self.sequence) - len(self.prompt)
        return min(self.limits.max_new_tokens - answered, self.context - len(self.sequence))

    def extend(self, drafted: Sequence[int], bonus: int) -> Chunk:
        """Add accepted draft tokens and the bonus token, up to the first one that ends the answer.

        Without a bonus token (NO_TOKEN) the answer ends in an error, unless a draft token has ended it.
        """
        if self.constraint is not None and self.constraint.is_complete:  # before its first token
            return self.end("grammar")
        tokens: list[int] = []
        pieces: list[str] = []
        for token in (*drafted, bonus):
            if token == NO_TOKEN:
                raised = self.constraint and self.constraint.find_error()
                if isinstance(self.sampling.processors, RequestProcessors):
                    raised = self.sampling.processors.find_error(self.sequence[len(self.prompt) :]) or raised
                self._fail(raised or FloatingPointError(NO_NUMBERS))
                break
            try:
                if self.constraint is not None:
                    self.constraint.take(token)
                self.sequence.append(token)
                tokens.append(token)
                if self.text is not None:
                    pieces.append(self.text.push(token))
                self.finish = self._end(token)
            except Exception as error:  # of the grammar, the tokenizer or the criterion
                self._fail(error)
            if self.finish:
                break
        if self.finish:
            pieces += self._finish_text()
        self._pieces += pieces
        return Chunk(self.request_id, tokens, min(len(drafted), len(tokens)), pieces, self.finish)

    def _fail(self, error: Exception) -> None:
        self.finish, self.exception = "error", error

    def end(self, finish: str, exception: Exception | None = None) -> Chunk:
        """End the answer where it is."""
        self.finish, self.exception = finish, exception
        pieces = self._finish_text()
        self._pieces += pieces
        return Chunk(self.request_id, [], 0, pieces, self.finish)

    def _finish_text(self) -> list[str]:
        """The text that was held back, of an answer that has ended."""
        pieces = list[str]()
        if self.text is not None:
            try:
                pieces.append(self.text.finish())
            except Exception as error:
                self._fail(error)
            # The text held back had a stop string.
            if self.text.stopped and self.finish in ("grammar", "length", "context"):
                self.finish = "stop"
        return pieces

    def deliver(self, chunk: Chunk, tokenizer: Tokenizer | None) -> Chunk:
        """The chunk, with the answer if it is the last one, for whoever iterates the request."""
        self.stats.add(chunk.stats)
        self._log_probs += chunk.log_probs
        if not self.finish:
            self._chunks.append(chunk)
            return chunk
        answer = self._make_answer(tokenizer)
        chunk = replace(chunk, answer=answer, finish=answer.finish)
        self._chunks.append(chunk)
        self.answer = answer
        return chunk

    def _make_answer(self, tokenizer: Tokenizer | None) -> Answer:
        tokens = self.sequence[len(self.prompt) :]
        text = "".join(self._pieces)
        try:
            if self.text is None and tokenizer is not None:
                text = decode(tokens, tokenizer)
        except Exception as error:
            self._fail(error)
        line = None
        if self.exception is not None:
            kind = "" if isinstance(self.exception, FloatingPointError) else f"{type(self.exception).__name__}: "
            line = f"request {self.request_id}: {kind}{self.exception}".splitlines()[0]
        return Answer(self.prompt, tokens, text, self.finish or "", self.stats, line, self.exception, self._log_probs)

    def _end(self, token: int) -> str | None:
        if token in self.limits.stop_ids:
            return "eos"
        if self.text is not None and self.text.stopped:
            return "stop"
        if self.constraint is not None and self.constraint.is_complete:
            return "grammar"
        # A copy: what the criterion does to its list is its own.
        if self.limits.criterion is not None and self.limits.criterion(self.request_id, [*self.sequence]):
            return "criterion"
        if len(self.sequence) - len(self.prompt) >= self.limits.max_new_tokens:
            return "length"
        return "context" if self.room <= 0 else None


def read_requests(
    target: Target,
    prompts: Sequence[Prompt],
    request_ids: Any = None,
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int | None = None,
    stop: Sequence[str] | str | None = (),
    stop_ids: Sequence[int] | int | None = None,
    criterion: Callable[[int, list[int]], bool] | None = None,
    chat: bool | None = None,
    nodes: int | None = None,
    text: bool = True,
    log_probs: int | None = None,
    grammar: AnyGrammar = None,
    follow_weights: bool = False,
    is_alone: bool = False,
    sampled: bool = False,
) -> list[Request]:
    """One request per prompt, encoded. Settings are those of `decode.stream`; None stands for a default.

    is_alone, sampled: see `RequestProcessors`. Raises ValueError or TypeError for settings that are out of range,
    request ids that do not match, and prompts that are invalid or do not fit the model.
    """
    target.read_version()  # a prompt must be checked against the model as it is
    _check_kinds(sampling, chat)
    check_switches(text=text, follow_weights=follow_weights)
    nodes = NODES if nodes is None else read_nodes(nodes)
    log_probs = None if log_probs is None else read_whole(log_probs, "log_probs", 0)
    if log_probs is not None and log_probs > target.vocabulary:
        raise ValueError(f"log_probs is {log_probs}; the model has {target.vocabulary} tokens to tell")
    stop = read_stop(stop)
    ends = target.stop_ids if stop_ids is None else _read_stop_ids(stop_ids, target)
    ends |= find_special(stop, target.tokenizer)
    limits = Limits(NEW_TOKENS if max_new_tokens is None else max_new_tokens, ends, stop, criterion)
    if limits.stop and target.tokenizer is None:
        raise ValueError("stop strings need a tokenizer: Target(model, tokenizer)")
    ids = _read_ids(request_ids, len(prompts))
    encoded = [_encode(target, number, prompt, chat) for number, prompt in zip(ids, prompts, strict=True)]
    sampling, has_text = sampling or Sampling(), (text or bool(limits.stop)) and target.tokenizer is not None
    processors = sampling.processors
    if isinstance(processors, Sequence) and not is_alone:
        [*map(copy_processor, processors)]  # refuses what cannot be copied
    make = None if grammar is None else make_matchers(grammar, target.tokenizer, target.vocabulary, ends)
    requests = []
    for request_id, prompt in zip(ids, encoded, strict=True):
        if processors:
            numbers = len(prompt), ends, limits.max_new_tokens
            made = RequestProcessors(processors, *numbers, is_alone=is_alone, sampled=sampled)
            sampling = replace(sampling, processors=made)
        stream = TextStream(target.tokenizer, limits.stop) if has_text and target.tokenizer is not None else None
        own = None if make is None else Constraint(partial(make, request_id), target.vocabulary)
        of = target.context, stream, sampling, nodes, log_probs
        requests.append(Request(request_id, prompt, limits, *of, constraint=own, follow_weights=follow_weights))
    return requests


def read_nodes(value: Any) -> int:
    """The most nodes of a tree. Raises TypeError or ValueError unless it is a number that trees can have."""
    nodes = read_count(value, "nodes")
    if nodes > MAX_TREE_SLOTS:
        raise ValueError(f"nodes is {nodes}; a tree has its root and at most {MAX_TREE_SLOTS} nodes")
    return nodes


def _read_ids(request_ids: Any, count: int) -> Sequence[int]:
    ids = [*range(count)] if request_ids is None else as_whole_numbers(request_ids, "request_ids")
    if not count == len(ids) == len(set(ids)) or isinstance(request_ids, Set):  # a set has no order
        raise ValueError(f"{count} prompts need as many different request_ids, in a list; given are {ids}")
    if not 0 <= min(ids) <= max(ids) < 1 << 63:
        raise ValueError(f"request_ids are numbers from 0 to 2^63 - 1; given are {min(ids)} to {max(ids)}")
    return ids


def _encode(target: Target, request_id: int, prompt: Prompt, chat: bool | None) -> list[int]:
    tokens = encode(prompt, target.tokenizer, chat)
    if len(tokens) >= target.context:
        raise ValueError(
            f"prompt {request_id} has {len(tokens)} tokens; the model's context of {target.context} leaves no room "
            "for an answer"
        )
    outside = [token for token in (min(tokens), max(tokens)) if not 0 <= token < target.vocabulary]
    if outside:
        raise ValueError(
            f"prompt {request_id} has token {outside[0]}; the model's vocabulary is 0 to {target.vocabulary - 1}"
        )
    return tokens


def _check_kinds(sampling: Any, chat: Any) -> None:
    if not isinstance(sampling, Sampling | None):
        call = "Sampling(temperature=0.7)"
        raise TypeError(f"sampling is a {type(sampling).__name__}; it is None or, for example, {call}")
    if not isinstance(chat, bool | None):
        raise TypeError(f"chat is {chat!r}; it is True, False or None")


def _read_stop_ids(stop_ids: Any, target: Target) -> frozenset[int]:
    """One token id or several. Raises ValueError for those that no answer can have."""
    ids = frozenset(as_whole_numbers(stop_ids, "stop_ids"))
    if outside := sorted(each for each in ids if not 0 <= each < target.vocabulary):
        raise ValueError(f"stop_ids have {outside[0]}; the model's vocabulary is 0 to {target.vocabulary - 1}")
    return ids
