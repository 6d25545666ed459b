"""Answers and their pieces as OpenAI's client library reads them."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from decode import Answer, Chunk
from decode.request import Request
from decode.requests.answer import LogProbs
from decode.requests.detokenizer import Detokenizer
from decode.requests.text import Tokenizer
from draftless_commands.server.fields import StreamOptions
from draftless_commands.server.tools import ToolReader

LEAST = -9999.0  # of a log-probability: JSON has no infinity
REASONS = {"eos": "stop", "stop": "stop", "grammar": "stop", "length": "length", "context": "length"}


@dataclass(frozen=True)
class Reply(ABC):
    """One answer of the server: what its choices are made of, as a whole and piece by piece.

    requests: one a choice. choices: how many of them share a prompt. streamed: what a stream has besides the text.
    prefix, kind, piece: what ids begin with, and the names of whole answers and of pieces.
    """

    model: str
    tokenizer: Tokenizer
    requests: Sequence[Request]
    choices: int
    streamed: StreamOptions
    created: int = field(default_factory=lambda: int(time.time()))

    prefix, kind, piece = "", "", ""

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    @property
    def id(self) -> str:
        return f"{self.prefix}-{self.requests[0].request_id}-{self.created}"

    def whole(self) -> dict[str, Any]:
        """All choices, whose requests have ended."""
        choices = [self.choose(index, request) for index, request in enumerate(self.requests)]
        return self.head(self.kind) | {"choices": choices, "usage": self.count_usage()}

    def begin(self) -> list[str]:
        """The events before the first text."""
        return []

    def go_on(self, index: int, chunk: Chunk) -> str:
        """The event for what a step added to a choice."""
        choice = {
            "index": index,
            "logprobs": self.tell(chunk.tokens, chunk.log_probs),
            "finish_reason": chunk.finish and REASONS[chunk.finish],
            **self.part(index, chunk),
        }
        if self.streamed.include_sources:
            texts = [*chunk.pieces[: len(chunk.tokens) - 1], "".join(chunk.pieces[len(chunk.tokens) - 1 :])]
            choice["pieces"] = [
                {"text": text, "source": name} for text, name in zip(texts, chunk.sources, strict=False)
            ]
        return self.event([choice])

    def end(self) -> list[str]:
        """The events after the last text."""
        usage = self.write(self.head(self.piece) | {"choices": [], "usage": self.count_usage()})
        return [*([usage] if self.streamed.include_usage else []), "data: [DONE]\n\n"]

    def event(self, choices: list[dict[str, Any]]) -> str:
        event = self.head(self.piece) | {"choices": choices}
        if self.streamed.include_usage:
            event["usage"] = self.count_usage() if self.streamed.continuous_usage_stats else None
        return self.write(event)

    @staticmethod
    def write(event: dict[str, Any]) -> str:
        """A server-sent event."""
        return f"data: {json.dumps(event)}\n\n"

    @abstractmethod
    def choose(self, index: int, request: Request) -> dict[str, Any]:
        """A whole choice, whose request has ended."""

    @abstractmethod
    def part(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """What a step added to a choice, as its event has it."""

    @abstractmethod
    def tell(self, tokens: Sequence[int], log_probs: Sequence[LogProbs]) -> dict[str, Any] | None:
        """The log-probabilities of tokens, if they were asked for."""

    def count_usage(self) -> dict[str, Any]:
        stats = [request.stats for request in self.requests]
        read = sum(len(request.prompt) for request in self.requests[:: self.choices])
        made, nodes = sum(each.tokens for each in stats), sum(each.nodes for each in stats)
        accepted = sum(sum(each.accepted_by_depth) for each in stats)
        return {
            "prompt_tokens": read,
            "completion_tokens": made,
            "total_tokens": read + made,
            "prompt_tokens_details": {"cached_tokens": sum(each.reused for each in stats[:: self.choices])},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": nodes - accepted,
            },
        }

    def name(self, token: int) -> str:
        """The text of a token within a text, here after itself: some tokenizers leave out a text's first space."""
        return str(self.tokenizer.decode([token, token])).removeprefix(self.tokenizer.decode([token]))

    def cut_stop(self, answer: Answer, stops: Iterable[str]) -> list[int]:
        """The tokens of an answer, without those of the stop string that ended it."""
        tokens, is_stopped = [*answer.tokens], answer.finish == "stop"
        while is_stopped and tokens and any(stop in self.tokenizer.decode(tokens) for stop in stops):
            tokens.pop()
        return tokens


@dataclass(frozen=True)
class ChatReply(Reply):
    """readers: of each choice's tool calls; none without tools."""

    readers: Sequence[ToolReader] = ()

    prefix, kind, piece = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choose(self, index: int, request: Request) -> dict[str, Any]:
        answer = request.answer
        assert answer is not None
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        reason = REASONS[answer.finish]
        if self.readers:
            message |= self.readers[index].read(answer.text, self.cut_stop(answer, request.limits.stop))
            if "tool_calls" in message:
                message, reason = message | {"content": message["content"] or None}, "tool_calls"
        told = self.tell(answer.tokens, answer.log_probs)
        return {"index": index, "message": message, "logprobs": told, "finish_reason": reason}

    def begin(self) -> list[str]:
        delta = {"role": "assistant", "content": ""}
        return [
            self.event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(len(self.requests))
        ]

    def part(self, index: int, chunk: Chunk) -> dict[str, Any]:
        if not self.readers:
            return {"delta": {"content": chunk.text} if chunk.text else {}}
        reader = self.readers[index]
        delta: dict[str, Any] = {"content": reader.push(chunk.text)}
        if chunk.answer is not None:
            held = reader.read(reader.held, self.cut_stop(chunk.answer, self.requests[index].limits.stop))
            delta = held | {"content": delta["content"] + held["content"]}
        if not delta["content"]:
            del delta["content"]
        if "tool_calls" not in delta:
            return {"delta": delta}
        calls = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        return {"delta": delta | {"tool_calls": calls}, "finish_reason": "tool_calls"}

    def tell(self, tokens: Sequence[int], log_probs: Sequence[LogProbs]) -> dict[str, Any] | None:
        if not log_probs:
            return None
        pairs = zip(tokens, log_probs, strict=True)
        return {"content": [self._entry(token, told.chosen, told.best) for token, told in pairs], "refusal": None}

    def _entry(self, token: int, log_p: float, best: dict[int, float] | None = None) -> dict[str, Any]:
        name = self.name(token)
        is_whole = "\ufffd" not in name  # others are parts of a character
        entry = {"token": name, "logprob": max(log_p, LEAST), "bytes": [*name.encode()] if is_whole else None}
        return entry if best is None else entry | {"top_logprobs": [self._entry(*each) for each in best.items()]}


class TextReply(Reply):
    prefix, kind, piece = "cmpl", "text_completion", "text_completion"

    def choose(self, index: int, request: Request) -> dict[str, Any]:
        answer = request.answer
        assert answer is not None
        told = self.tell(answer.tokens, answer.log_probs)
        if told is not None:
            detokenizer = Detokenizer(self.tokenizer)  # a character may be of several tokens
            lengths = (len(detokenizer.push(token)) for token in answer.tokens[:-1])
            told["text_offset"] = [*accumulate(lengths, initial=0)]
        return {"index": index, "text": answer.text, "logprobs": told, "finish_reason": REASONS[answer.finish]}

    def part(self, index: int, chunk: Chunk) -> dict[str, Any]:
        return {"text": chunk.text}

    def tell(self, tokens: Sequence[int], log_probs: Sequence[LogProbs]) -> dict[str, Any] | None:
        if not log_probs:
            return None
        names = [self.name(token) for token in tokens]
        best: list[dict[str, float]] = [{} for _ in log_probs]
        for named, each in zip(best, log_probs, strict=True):  # of tokens with the same text the most likely one
            for token, p in each.best.items():
                named.setdefault(self.name(token), max(p, LEAST))
        return {
            "tokens": names,
            "token_logprobs": [max(each.chosen, LEAST) for each in log_probs],
            "top_logprobs": best if any(best) else None,
        }
