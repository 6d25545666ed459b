"""From the target's logits to the probabilities that tokens are drawn from.

Shapes: B rows, L tokens of a prefix, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import logits_process

from decode.devices.transfer import waits
from decode.requests.numbers import describe, read_number, read_whole

LOWEST_TEMPERATURE = 1e-30  # scores that are divided by less could overflow in float32
TOP = 1024  # tokens that `FastTopP` sorts before it sorts all
NO_TOKEN = -1  # instead of a drawn token, where logits are NaN or infinite
STATEFUL = (  # of transformers' processors; the first calls a function of the user
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

Processors: TypeAlias = Sequence[LogitsProcessor] | Callable[[int], Sequence[LogitsProcessor]]


def upcast_half(logits: Tensor) -> Tensor:
    """Half precision as float32: top-p and sampling need more digits, and a CPU's argmax is slow in half precision."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def warp(scores: Tensor, warpers: Sequence[LogitsProcessor]) -> Tensor:
    """The probabilities [B, V] float64 by scores [B, V], after warpers, which need no prefix."""
    for warper in warpers:
        scores = warper(None, scores)
    return scores.double().softmax(dim=-1)


class ProcessorGroup(LogitsProcessor):
    """Several logits processors that are called as one."""

    processors: Sequence[LogitsProcessor]

    def regroup(self, processors: Sequence[LogitsProcessor]) -> LogitsProcessor:
        """The same with other processors."""
        raise NotImplementedError


def keeps_state(processor: LogitsProcessor) -> bool:
    """Whether a processor may depend on more than the prefix, as a user's may and those in `STATEFUL` do."""
    if isinstance(processor, ProcessorGroup):
        return any(map(keeps_state, processor.processors))
    return type(processor).__module__ != logits_process.__name__ or isinstance(processor, STATEFUL)


def draft_processors(processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
    """The processors that a draft model may call with draft tokens, which may never become text.

    These are transformers' own, which depend on the prefix alone. A user's function or processor may keep state, or
    raise after a token that it does not expect.
    """
    chosen: list[LogitsProcessor] = []
    for processor in processors:
        if isinstance(processor, ProcessorGroup):
            chosen.append(processor.regroup(draft_processors(processor.processors)))
        elif not keeps_state(processor):
            chosen.append(processor)
    return chosen


def copy_processor(processor: LogitsProcessor) -> LogitsProcessor:
    """A deep copy of a processor; itself if it keeps no state. Raises ValueError if it cannot be copied."""
    if isinstance(processor, ProcessorGroup):
        return processor.regroup([*map(copy_processor, processor.processors)])
    return copy_own(processor) if keeps_state(processor) else processor


def copy_own(made: Any, advice: str = "make one for each request: Sampling(processors=lambda id: [...])") -> Any:
    """A deep copy of a user's processor or criterion. Raises ValueError, with this advice, if it cannot be copied."""
    try:
        return deepcopy(made)
    except Exception as error:  # each type has errors of its own
        raise ValueError(
            f"{type(made).__name__} may keep state, so each request needs its own, but it cannot be copied "
            f"({type(error).__name__}: {error}); {advice}"
        ) from error


class AnswerProcessor(ProcessorGroup):
    """One request's processors, called as in plain decoding: with the prompt, then with one more token each time.

    They are called inside the answer only: draft tokens may go on after its end, where a grammar may raise. After
    sampled draft tokens that were rejected, `renew` makes new processors, which are called with the text once more.
    error: what one of them raised. From then on all scores are NaN, so that the answer ends after the tokens before.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        renew: Callable[[], Sequence[LogitsProcessor]],
        prompt_length: int,
        stop_ids: frozenset[int],
        max_new_tokens: int,
    ) -> None:
        self.processors, self.renew, self.prompt_length = processors, renew, prompt_length
        self.stop_ids, self.max_new_tokens = stop_ids, max_new_tokens
        self._called: list[int] | None = None  # the answer up to the last call
        self.error: Exception | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        try:
            if self.error is None:
                return self._process(input_ids, scores)
        except Exception as error:
            self.error = error
        return torch.full_like(scores, torch.nan)

    def _process(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[0, self.prompt_length :].tolist()
        if len(answer) >= self.max_new_tokens or not self.stop_ids.isdisjoint(answer):
            return scores
        if any(map(keeps_state, self.processors)):
            before, self._called = self._called, answer
            if answer[:-1] != before if answer else before is not None:
                self._call_again(input_ids, scores)
        return apply_processors(self.processors, input_ids, scores)

    def _call_again(self, input_ids: Tensor, scores: Tensor) -> None:
        """Make new processors, and call them with all prefixes before `input_ids`."""
        self.processors = self.renew()
        for length in range(self.prompt_length, input_ids.shape[1]):
            apply_processors(self.processors, input_ids[:, :length], torch.zeros_like(scores))

    def regroup(self, processors: Sequence[LogitsProcessor]) -> AnswerProcessor:
        return AnswerProcessor(processors, self.renew, self.prompt_length, self.stop_ids, self.max_new_tokens)


class RequestProcessors:
    """The processors of one request, made at the first call: deep copies, or what the user's callable makes.

    is_alone: no other request has these processors, so it gets the user's own objects.
    sampled: whether draft tokens are sampled, so that a processor may be called with tokens that are then rejected.

    Raises ValueError for a processor that must be copied now and cannot be.
    """

    def __init__(
        self,
        processors: Processors,
        prompt_length: int,
        stop_ids: frozenset[int],
        max_new_tokens: int,
        *,
        is_alone: bool,
        sampled: bool,
    ) -> None:
        self.limits = prompt_length, stop_ids, max_new_tokens
        self._own: Sequence[LogitsProcessor] | None = None  # the user's, used as they are
        self._made: AnswerProcessor | None = None
        if not isinstance(processors, Sequence):
            self._make = processors
            return
        self._own = processors if is_alone else None
        # Of objects that are used, copies are made before.
        copies = [*map(copy_processor, processors)] if sampled and is_alone else None
        self._make = partial(_copy_all, copies if is_alone else processors)

    def __call__(self, request_id: int) -> list[LogitsProcessor]:
        if self._made is None:
            renew = partial(self._make, request_id)
            self._made = AnswerProcessor(self._own or (), renew, *self.limits)
            try:
                if self._own is None:
                    self._made.processors = renew()
                if not isinstance(self._made.processors, Sequence):
                    kind = type(self._made.processors).__name__
                    raise TypeError(f"processors(request_id) returned {kind}; it must return a list")
            except Exception as error:
                self._made.error = error
        return [self._made]

    @property
    def error(self) -> Exception | None:
        """What a processor raised, or what could not be made."""
        return self._made and self._made.error


def _copy_all(processors: Sequence[LogitsProcessor] | None, request_id: int) -> list[LogitsProcessor]:
    if processors is None:
        raise ValueError(
            f"request {request_id}: its logits processors saw sampled draft tokens that were rejected, and they may "
            "keep state; give the proposer sampled = True, so that they are copied before"
        )
    return [*map(copy_processor, processors)]


def apply_processors(processors: Sequence[LogitsProcessor], input_ids: Tensor, scores: Tensor) -> Tensor:
    """The processed scores [1, V] after a request's prefix [1, L].

    Raises TypeError or ValueError for anything but a tensor of numbers of that shape, on the same device.
    """
    shape, device = scores.shape, scores.device
    for processor in processors:
        scores, name = processor(input_ids, scores), type(processor).__name__
        if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.device != device:
            kind = f"{scores.dtype} on {scores.device}" if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(f"{name} returned {kind}; it must return a tensor of floating-point scores on {device}")
        if scores.shape != shape:
            raise ValueError(
                f"{name} returned scores of shape {[*scores.shape]} for one request; it must return {[*shape]}"
            )
    return scores


class FastTopP(TopPLogitsWarper):
    """transformers' top-p with the same result, ten times faster on a CPU: it sorts only the most likely tokens.

    A row is sorted completely if these do not suffice, or if tokens tie at the boundary.
    """

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        if waits(scores) or scores.shape[-1] <= TOP:
            return super().__call__(input_ids, scores)
        top, tokens = scores.softmax(dim=-1).topk(TOP, dim=-1)
        inside = top.cumsum(dim=-1) - top < self.top_p  # the more likely tokens do not suffice
        inside[:, 0] |= top[:, 0] >= 0  # in float32, the smallest top-p is 0
        count = inside.sum(dim=-1, keepdim=True).clamp(min=1)  # NaN is not inside
        boundary = top.gather(-1, torch.cat([count - 1, count.clamp(max=TOP - 1)], dim=-1))
        unsure = (boundary[:, 0] == boundary[:, 1]) | top[:, 0].isnan()  # a tie, or all are inside
        result = torch.full_like(scores, -torch.inf)
        result.scatter_(-1, tokens, scores.gather(-1, tokens).masked_fill(~inside, -torch.inf))
        if bool(unsure.any()):
            result[unsure] = super().__call__(input_ids, scores[unsure])
        return result


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The defaults are greedy decoding.

    temperature: 0 takes the most likely token. top_k, top_p, min_p: as in transformers; 0, 1 and 0 are off.
    processors: logits processors, or a callable that makes a request's own from its id:
    `processors=lambda request_id: [...]`. They may keep state: each request has its own, called with one prefix
    [1, L] and scores [1, V] at a time, as in plain decoding: with the prompt, then with one more token each time.
    From a list, several requests get deep copies; a single one gets the objects themselves. Functions are not copied,
    so they must keep no state. After sampled draft tokens that were rejected, a new copy is called with the text once
    more and scores of zero, so there the state may depend on the tokens alone. Draft models call only those of
    transformers' own processors that keep no state.
    seed: the same seed gives the same text in every batch and with every proposer of deterministic drafts; by default
    it comes from torch's generator, which `torch.manual_seed` sets. Greedy decoding needs none and leaves it alone.

    None stands for a default. Numbers may be numpy's or torch's. Raises TypeError for anything else than a number, and
    ValueError if it is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    processors: Processors = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        self._convert()
        if self.temperature != 0 and not LOWEST_TEMPERATURE <= self.temperature < float("inf"):
            allowed = f"0 (greedy) or a positive number, at least {LOWEST_TEMPERATURE}"
            raise ValueError(f"temperature is {self.temperature}; it must be {allowed}")
        if self.top_k < 0:
            raise ValueError(f"top-k is {self.top_k}; it must be 0 (off) or a positive number of tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p is {self.top_p}; it must lie in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min-p is {self.min_p}; it must lie in [0, 1]")
        is_list = isinstance(self.processors, Sequence) and all(map(callable, self.processors))
        if isinstance(self.processors, LogitsProcessor) or not (is_list or callable(self.processors)):
            raise ValueError(
                f"processors is {describe(self.processors)}; it must be a list of logits processors, or a callable "
                "that makes one from a request id"
            )

    def _convert(self) -> None:
        """Turn all numbers into Python's own, and None into a default."""
        for name, default, read in (
            ("temperature", 0.0, read_number),
            ("top_k", 0, read_whole),
            ("top_p", 1.0, read_number),
            ("min_p", 0.0, read_number),
            ("processors", (), lambda value, name: value),
            ("seed", None, read_whole),
        ):
            value = getattr(self, name)
            object.__setattr__(self, name, default if value is None else read(value, name))
        if self.seed is None and not self.greedy:
            object.__setattr__(self, "seed", int(torch.randint(1 << 62, ())))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def kind(self) -> Sampling:
        """Temperature, top-k, top-p and min-p alone: trees of rows of one kind are accepted together."""
        return Sampling() if self.greedy else replace(self, processors=(), seed=0)

    @cached_property
    def warpers(self) -> LogitsProcessorList:
        """Temperature, top-k, top-p and min-p in transformers' order. They need no prefix."""
        warpers = LogitsProcessorList()
        if self.greedy:
            return warpers
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
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
        return replace(self, processors=lambda request_id: draft_processors(self._find_processors(request_id)))

    def _find_processors(self, request_id: int) -> Sequence[LogitsProcessor]:
        return self.processors if isinstance(self.processors, Sequence) else self.processors(request_id)

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
        return apply_processors(self._find_processors(request_id), prefix[None], scores[None].clone())[0]


def group_rows(samplings: Sequence[Sampling]) -> list[tuple[Sampling, list[int]]]:
    """The rows whose tokens are chosen in the same way, and that way; the seeds may differ.

    A row with logits processors is a group of its own.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, sampling in enumerate(samplings):
        groups.setdefault(row if sampling.processors else sampling.kind, []).append(row)
    return [(samplings[rows[0]], rows) for rows in groups.values()]


def for_groups(samplings: Sequence[Sampling], compute: Callable[[Sampling, Any], Tensor]) -> Tensor:
    """What `compute` makes of each group of rows, as one tensor with all rows in order.

    It gets the group's sampling, and its rows as an index: a list, or a slice of all rows.
    """
    groups = group_rows(samplings)
    if len(groups) == 1:
        return compute(samplings[0], slice(None))
    order = [row for _, rows in groups for row in rows]
    parts = torch.cat([compute(*group) for group in groups])
    return parts[torch.tensor([order.index(row) for row in range(len(order))]).to(parts.device)]
