"""From the target's logits to the probabilities that tokens are drawn from.

Shapes: B rows, L tokens of a prefix, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import logits_process

from decode.cpu.fast_top_p import FastTopP

NO_TOKEN = -1  # instead of a drawn token, where logits are NaN or infinite
CALLING_USERS = (PrefixConstrainedLogitsProcessor,)  # processors that call a function of the user


def upcast_half(logits: Tensor) -> Tensor:
    """Half precision as float32: top-p and sampling need more digits, and a CPU's argmax is slow in half precision."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def warp(scores: Tensor, warpers: Sequence[LogitsProcessor]) -> Tensor:
    """The probabilities [B, V] float64 by scores [B, V], after warpers, which need no prefix."""
    for warper in warpers:
        scores = warper(None, scores)
    return scores.double().softmax(dim=-1)


class RequestProcessor(LogitsProcessor):
    """A logits processor that treats requests differently: it also gets the request id of the prefix."""

    def __call__(self, input_ids: Tensor, scores: Tensor, request_id: int) -> Tensor:
        raise NotImplementedError

    def for_drafts(self) -> RequestProcessor:
        """The same with only those of its processors that may be applied to drafts (`draft_processors`)."""
        raise NotImplementedError


@dataclass
class AnswerProcessor(RequestProcessor):
    """Calls processors inside answers only. Draft tokens may go on after an answer's end, where a grammar may raise."""

    processors: Sequence[LogitsProcessor]
    prompt_lengths: Mapping[int, int]  # by request id
    stop_ids: frozenset[int]
    max_new_tokens: int

    def __call__(self, input_ids: Tensor, scores: Tensor, request_id: int) -> Tensor:
        answer = input_ids[0, self.prompt_lengths[request_id] :].tolist()
        if len(answer) >= self.max_new_tokens or not self.stop_ids.isdisjoint(answer):
            return scores
        return apply_processors(self.processors, input_ids, scores, request_id)

    def for_drafts(self) -> AnswerProcessor:
        return replace(self, processors=draft_processors(self.processors))


def draft_processors(processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
    """The processors that a draft model may call with draft tokens, which may never become text.

    These are transformers' own, which depend on the prefix alone. A user's function or processor may keep state, or
    raise after a token that it does not expect.
    """
    chosen = []
    for processor in processors:
        if isinstance(processor, RequestProcessor):
            chosen.append(processor.for_drafts())
        elif type(processor).__module__ == logits_process.__name__ and type(processor) not in CALLING_USERS:
            chosen.append(processor)
    return chosen


def apply_processors(
    processors: Sequence[LogitsProcessor], input_ids: Tensor, scores: Tensor, request_id: int
) -> Tensor:
    """The processed scores [1, V] after a request's prefix [1, L]."""
    for processor in processors:
        extra = (request_id,) if isinstance(processor, RequestProcessor) else ()
        scores = processor(input_ids, scores, *extra)
    return scores


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The defaults are greedy decoding.

    temperature: 0 takes the most likely token. top_k 0, top_p 1 and min_p 0 are off. processors: any of transformers'
    logits processors; each sees one row's prefix (prompt, answer and draft tokens up to a node). seed: the same seed
    gives the same text in every batch and with every proposer of deterministic drafts; by default it comes from torch's
    generator, which `torch.manual_seed` sets.

    Raises ValueError if a setting is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    processors: Sequence[LogitsProcessor] = ()
    seed: int = field(default_factory=lambda: int(torch.randint(1 << 62, ())))

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top-k is {self.top_k}; it must be 0 (off) or a positive number of tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p is {self.top_p}; it must lie in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min-p is {self.min_p}; it must lie in [0, 1]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def warpers(self) -> LogitsProcessorList:
        """Temperature, top-k, top-p and min-p in transformers' order. They need no prefix."""
        warpers = LogitsProcessorList()
        if self.greedy:
            return warpers
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(FastTopP(self.top_p))
        if self.min_p:
            warpers.append(MinPLogitsWarper(self.min_p))
        return warpers

    @cached_property
    def for_drafts(self) -> Sampling:
        """The same with only those processors that may be applied to drafts (`draft_processors`)."""
        return replace(self, processors=draft_processors(self.processors))

    def probabilities(
        self, logits: Tensor, prefixes: Sequence[Tensor | None] = (), request_ids: Sequence[int] = ()
    ) -> Tensor:
        """The probabilities of the next token, [B, V] float64, each row summing to one.

        A row is all NaN if one of its logits is NaN or infinite. logits [B, V]. Processors also need prefixes, each
        row's tokens so far ([L], None for a row whose result will be ignored), and request_ids (by default 0, 1, ...).
        """
        scores = self.process(upcast_half(logits), prefixes, request_ids)
        if self.greedy:
            best = scores.argmax(dim=-1, keepdim=True)  # NaN counts as the largest
            p = torch.zeros_like(scores, dtype=torch.float64).scatter_(-1, best, 1.0)
            return p.masked_fill_(~scores.gather(-1, best).isfinite(), torch.nan)
        return warp(scores, self.warpers)

    def process(
        self, scores: Tensor, prefixes: Sequence[Tensor | None] = (), request_ids: Sequence[int] = ()
    ) -> Tensor:
        """The scores [B, V] after all processors. Other arguments as in `probabilities`."""
        if not self.processors:
            return scores
        rows = zip(prefixes, scores, request_ids or range(len(scores)), strict=True)
        return torch.stack([row if prefix is None else self._process(prefix, row, id_) for prefix, row, id_ in rows])

    def _process(self, prefix: Tensor, scores: Tensor, request_id: int) -> Tensor:
        # Processors may write into their input.
        return apply_processors(self.processors, prefix[None], scores[None].clone(), request_id)[0]
