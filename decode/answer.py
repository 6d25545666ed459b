"""Requests, their answers and the chunks they arrive in, and where an answer ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from transformers import StoppingCriteria, StoppingCriteriaList

from decode.sampling import NO_TOKEN
from decode.stats import Stats
from decode.target import Target
from decode.text import Prompt, TextStream, Tokenizer, as_whole, as_whole_numbers, decode, encode

NO_NUMBERS = (
    "no token can be chosen: the model's logits, or a logits processor's scores, are NaN or infinite, or a processor "
    "forbids every token; check weights and processors, and try float32 or bfloat16 if the model runs in float16"
)


@dataclass(frozen=True)
class Limits:
    """Where answers end: after `max_new_tokens`, at a stop token or stop string, or by `criterion`.

    `criterion(request_id, tokens)` is called after every new token with all tokens, prompt included.
    """

    max_new_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    stop: Sequence[str] = ()
    criterion: Callable[[int, list[int]], bool] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_new_tokens", read_count(self.max_new_tokens, "max_new_tokens"))
        if isinstance(self.stop, str):
            raise ValueError("stop is a list of strings; put a single one into brackets")
        if "" in self.stop:
            raise ValueError("a stop string is empty; it needs at least one character")
        if not (self.criterion is None or callable(self.criterion)) or isinstance(
            self.criterion, StoppingCriteria | StoppingCriteriaList
        ):
            name = type(self.criterion).__name__
            raise TypeError(f"criterion is a function of a request id and all tokens, not a {name}")


def read_count(value: Any, name: str) -> int:
    """A whole number from 1 on. Raises TypeError or ValueError, with the setting's name, for anything else."""
    number = as_whole(value)
    if number is None:
        raise TypeError(f"{name} is {value!r}; it must be a whole number from 1 on")
    if number < 1:
        raise ValueError(f"{name} is {number}; it must be at least 1")
    return number


@dataclass(frozen=True)
class Chunk:
    """What one step added to one answer."""

    request_id: int
    tokens: list[int]
    drafted: int  # how many tokens, the first ones, are accepted draft tokens
    pieces: list[str]  # the text that each token completed; at the end of an answer also the text held back
    finish: str | None  # why it ended: "eos", "stop", "length", "context", "criterion" or "error"; None: it goes on
    stats: Stats = field(default_factory=Stats)  # of this step
    answer: Answer | None = None  # the whole answer, once it is finished

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(repr=False)
class Answer:
    """A finished answer."""

    prompt: list[int]
    tokens: list[int]  # as transformers' `generate` returns them, stop token included
    text: str
    finish: str  # why it ended, as in `Chunk`
    stats: Stats
    error: str | None = None  # with "error": one line; the tokens are those before it

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        size = f"{len(self.prompt)} prompt tokens, {len(self.tokens)} new, tau {self.stats.tau:.2f}"
        return f"Answer({text!r}, finish={self.finish!r}, {size})"


@dataclass
class Request:
    """A prompt and its answer so far."""

    request_id: int
    prompt: list[int]
    limits: Limits
    context: int
    text: TextStream | None = None
    sequence: list[int] = field(init=False)
    stats: Stats = field(default_factory=Stats)
    finish: str | None = None

    def __post_init__(self) -> None:
        self.sequence = list(self.prompt)
        self._pieces: list[str] = []

    @property
    def room(self) -> int:
        """How many more tokens it may get."""
        answered = len(self.sequence) - len(self.prompt)
        return min(self.limits.max_new_tokens - answered, self.context - len(self.sequence))

    def extend(self, drafted: Sequence[int], bonus: int) -> Chunk:
        """Add accepted draft tokens and the bonus token, up to the first one that ends the answer.

        Without a bonus token (NO_TOKEN) the answer ends in an error, unless a draft token has ended it.
        """
        tokens: list[int] = []
        pieces: list[str] = []
        for token in (*drafted, bonus):
            if token != NO_TOKEN:
                self.sequence.append(token)
                tokens.append(token)
                if self.text is not None:
                    pieces.append(self.text.push(token))
            self.finish = "error" if token == NO_TOKEN else self._end(token)
            if self.finish:
                if self.text is not None:
                    pieces.append(self.text.finish())
                break
        self._pieces += pieces
        return Chunk(self.request_id, tokens, min(len(drafted), len(tokens)), pieces, self.finish)

    def answer(self, tokenizer: Tokenizer | None) -> Answer:
        """The finished answer."""
        tokens = self.sequence[len(self.prompt) :]
        text = "".join(self._pieces)
        if self.text is None and tokenizer is not None:
            text = decode(tokens, tokenizer)
        error = f"request {self.request_id}: {NO_NUMBERS}" if self.finish == "error" else None
        return Answer(self.prompt, tokens, text, self.finish or "", self.stats, error)

    def _end(self, token: int) -> str | None:
        if token in self.limits.stop_ids:
            return "eos"
        if self.text is not None and self.text.stopped:
            return "stop"
        if self.limits.criterion is not None and self.limits.criterion(self.request_id, self.sequence):
            return "criterion"
        if len(self.sequence) - len(self.prompt) >= self.limits.max_new_tokens:
            return "length"
        return "context" if self.room <= 0 else None


def make_requests(
    target: Target,
    prompts: Sequence[Prompt],
    request_ids: Any,
    limits: Limits,
    chat: bool | None,
    text: bool,
) -> list[Request]:
    """One request per prompt, encoded. text: whether its chunks carry text.

    Raises ValueError or TypeError for request ids that do not match, and for prompts that are invalid or do not fit the
    model.
    """
    if limits.stop and target.tokenizer is None:
        raise ValueError("stop strings need a tokenizer: Target(model, tokenizer)")
    ids = [*range(len(prompts))] if request_ids is None else as_whole_numbers(request_ids, "request_ids")
    if not len(prompts) == len(ids) == len(set(ids)) or isinstance(request_ids, Set):  # a set has no order
        raise ValueError(f"{len(prompts)} prompts need as many different request_ids, in a list; given are {ids}")
    if not 0 <= min(ids) <= max(ids) < 1 << 63:
        raise ValueError(f"request_ids are numbers from 0 to 2^63 - 1; given are {min(ids)} to {max(ids)}")
    requests = []
    for request_id, prompt in zip(ids, prompts, strict=True):
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
        stream = TextStream(target.tokenizer, limits.stop) if text and target.tokenizer is not None else None
        requests.append(Request(request_id, tokens, limits, target.context, stream))
    return requests
