"""Logits processors of requests: each request has its own, which are called as in plain decoding.

Shapes: L tokens of a prefix, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedTokenizerBase,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import logits_process

STATEFUL = (  # of transformers' processors; the first calls a function of the user
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

CODE = type, FunctionType, ModuleType  # what is not copied

Processors: TypeAlias = Sequence[LogitsProcessor] | Callable[[int], Sequence[LogitsProcessor]]


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
    """A deep copy of a user's processor or criterion, which shares its models and tokenizers.

    Raises ValueError, with this advice, if it cannot be copied.
    """
    try:
        return deepcopy(made, {id(part): part for part in _list_shared(made)})
    except Exception as error:  # each type has errors of its own
        raise ValueError(
            f"{type(made).__name__} may keep state, so each request needs its own, but it cannot be copied "
            f"({type(error).__name__}: {error}); {advice}"
        ) from error


def _list_shared(made: Any, depth: int = 3) -> Iterator[nn.Module | PreTrainedTokenizerBase]:
    """The models and tokenizers among the attributes of an object, or in its lists and dictionaries."""
    if not isinstance(made, dict | list | tuple):
        made = {} if isinstance(made, CODE) else getattr(made, "__dict__", {})
    for part in [*made.values()] if isinstance(made, dict) else made:
        if isinstance(part, nn.Module | PreTrainedTokenizerBase):
            yield part
        elif depth:
            yield from _list_shared(part, depth - 1)


class AnswerProcessor(ProcessorGroup):
    """One request's processors, called as in plain decoding: with the prompt, then with one more token each time.

    They are called inside the answer only: draft tokens may go on after its end, where a grammar may raise. After
    sampled draft tokens that were rejected, `renew` makes new processors, which are called with the text once more.
    What one of them raises makes all scores after this prefix NaN: if the text gets there, the answer ends.
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
        self.failure: tuple[list[int], Exception] | None = None  # the answer so far, and what was raised

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[0, self.prompt_length :].tolist()
        try:
            if self.find_error(answer) is None:
                return self._process(answer, input_ids, scores)
        except Exception as error:
            self.failure = answer, error
        return torch.full_like(scores, torch.nan)

    def find_error(self, answer: Sequence[int]) -> Exception | None:
        """What was raised in this answer, and not after draft tokens that were rejected."""
        if self.failure is None:
            return None
        beginning, error = self.failure
        return error if [*answer[: len(beginning)]] == beginning else None

    def _process(self, answer: list[int], input_ids: Tensor, scores: Tensor) -> Tensor:
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
                self._made.failure = [], error
        return [self._made]

    def find_error(self, answer: Sequence[int]) -> Exception | None:
        """What a processor raised in this answer, or what could not be made."""
        return self._made and self._made.find_error(answer)


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
