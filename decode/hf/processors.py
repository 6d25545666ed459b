"""transformers' logits processors as a `Sampling`, and its stopping criteria, for each row of a batch.

Shapes: B rows, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import logits_process, stopping_criteria

from decode.grammars.matcher import Constraint, forbid
from decode.hf.prompts import Prompts
from decode.trees.processors import ProcessorGroup, Processors, copy_own
from decode.trees.sampling import Sampling

# The warpers that `Sampling` has itself, in transformers' order.
WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


def make_sampling(config: GenerationConfig, processors: Sequence[LogitsProcessor], prompts: Prompts) -> Sampling:
    """The distribution that `generate`'s processors describe."""
    others, settings = list(processors), {"temperature": 1.0} if config.do_sample else {"seed": 0}
    for name, kind in reversed(WARPERS.items()):  # the last ones: `Sampling` applies them to all rows at once
        last = others[-1] if others and config.do_sample else None
        if type(last) is kind and getattr(last, name) > 0 and getattr(last, "min_tokens_to_keep", 1) == 1:
            settings[name] = getattr(others.pop(), name)
    count, copies = len(prompts.tokens), config.num_return_sequences or 1
    chosen: Processors = [RowProcessor(others, prompts, 0)] if others else ()
    if others and count > 1:

        def choose(row: int) -> list[LogitsProcessor]:
            return [RowProcessor([_select_row(each, row, count, copies) for each in others], prompts, row)]

        choose(0)  # refuses what cannot be copied
        chosen = choose
    return Sampling(processors=chosen, **settings)


def make_criterion(criteria: Sequence[StoppingCriteria], prompts: Prompts) -> Callable[[int, list[int]], bool]:
    """The criterion of `decode.stream`, from `generate`'s criteria. Each row has its own copies."""
    count = len(prompts.tokens)
    rows = [[_select_criterion(criterion, row, count) for criterion in criteria] for row in range(count)]

    def is_done(row: int, tokens: list[int]) -> bool:
        padded = prompts.pad(row, tokens)
        done = [_pick_row(each, torch.as_tensor(each(padded, None)), (), row, count) for each in rows[row]]
        return any(map(bool, done))  # all were called, as in transformers

    return is_done


class RowProcessor(ProcessorGroup):
    """Logits processors made for a padded batch, called for one of its rows."""

    def __init__(self, processors: Sequence[LogitsProcessor], prompts: Prompts, row: int) -> None:
        self.processors, self.prompts, self.row = processors, prompts, row

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        padded, size = self.prompts.pad(self.row, input_ids[0]), scores.shape[1:]
        for processor in self.processors:
            scores = _pick_row(processor, processor(padded, scores), size, self.row, len(self.prompts.tokens))
        return scores

    def regroup(self, processors: Sequence[LogitsProcessor]) -> RowProcessor:
        return RowProcessor(processors, self.prompts, self.row)


class GrammarMasks(LogitsProcessor):
    """The masks of each row's grammar, for scores that are made once more.

    columns: of the prompts. counts: the tokens of each row's answer; padding follows.
    """

    def __init__(self, constraints: Sequence[Constraint], columns: int, counts: Sequence[int]) -> None:
        self.constraints, self.columns, self.counts = constraints, columns, counts

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masks, made = dict[int, Tensor](), input_ids.shape[1] - self.columns
        for row, (constraint, count) in enumerate(zip(self.constraints, self.counts, strict=True)):
            if made >= count:
                continue
            if made:
                constraint.take(int(input_ids[row, -1]))
            if (allowed := constraint.find_allowed()) is not None:
                masks[row] = allowed[None]
        return forbid(scores[:, None], masks)[:, 0]


def _pick_row(made: Any, result: Tensor, size: Sequence[int], row: int, count: int) -> Tensor:
    """A row's own of a result [1, *size], or [count, *size] if it has a row for each one of the batch, as [1, *size].

    Raises ValueError for another shape, and where it cannot be known what was meant for this row.
    """
    name, unclear = type(made).__name__, _find_unclear(made, count)
    if result.shape == (count, *size):
        return result[row : row + 1] if count > 1 else result
    if result.shape != (1, *size) and (size or result.ndim):
        raise ValueError(f"{name} returned shape {[*result.shape]} for one row; it must return {[1, *size]}")
    if unclear:
        raise ValueError(
            f"{name}.{unclear} has {count} entries, as many as the batch has rows, and it is not clear whether each is "
            f"meant for a row; generate row by row, or shape them [{count}, ...] if each row has its own"
        )
    return result


def _select_row(processor: LogitsProcessor, row: int, count: int, copies: int) -> LogitsProcessor:
    """A processor for one row, with its own entry of what there is for each row. copies: rows of the same prompt."""
    if _is_users(processor):
        return _select_own(processor, row, count)
    own = copy(processor)
    if isinstance(own, RepetitionPenaltyLogitsProcessor) and isinstance(own.prompt_ignore_length, Tensor):
        own.prompt_ignore_length = own.prompt_ignore_length[row : row + 1]
    elif isinstance(own, PrefixConstrainedLogitsProcessor):
        allowed, own._num_beams = own._prefix_allowed_tokens_fn, 1  # transformers counts copies as beams
        own._prefix_allowed_tokens_fn = lambda _, tokens: allowed(row // copies, tokens)
    elif isinstance(own, EncoderRepetitionPenaltyLogitsProcessor):
        own.encoder_input_ids = own.encoder_input_ids[row // copies][None]
    elif isinstance(own, EncoderNoRepeatNGramLogitsProcessor):
        own.generated_ngrams, own.batch_size = own.generated_ngrams[row // copies :][:1], 1
    return own


def _select_criterion(criterion: StoppingCriteria, row: int, count: int) -> StoppingCriteria:
    """A criterion for one row. transformers' own keep no state, and a single row has the user's own."""
    return _select_own(criterion, row, count) if _is_users(criterion) and count > 1 else criterion


def _is_users(made: Any) -> bool:
    """Whether a processor or criterion is not transformers' own."""
    return type(made).__module__ not in (logits_process.__name__, stopping_criteria.__name__)


def _select_own(made: Any, row: int, count: int) -> Any:
    """A deep copy of a user's object with one row of the attributes that hold something for each row.

    These are tensors and arrays [B, ...], lists and tuples of B things that are no numbers, and dicts by row.
    """
    own = copy_own(made, "give it a __deepcopy__, or generate row by row")
    for name, value in list(getattr(own, "__dict__", {}).items()):
        if _has_rows(value, count):
            setattr(own, name, {0: value[row]} if isinstance(value, dict) else value[row : row + 1])
    return own


def _has_rows(value: Any, count: int) -> bool:
    """Whether an attribute holds something for each row."""
    if isinstance(value, dict):
        return [*value] == [*range(count)]
    if isinstance(value, (list, tuple)):
        return len(value) == count and not _are_plain(value)
    return len(getattr(value, "shape", ())) > 1 and value.shape[0] == count


def _find_unclear(made: Any, count: int) -> str | None:
    """The name of a user's attribute with B numbers, which may be meant for the rows or for all of them."""
    for name, value in getattr(made, "__dict__", {}).items() if count > 1 and _is_users(made) else ():
        is_list = isinstance(value, (list, tuple)) and _are_plain(value) and len(value) == count
        if is_list or getattr(value, "shape", None) == (count,):
            return name
    return None


def _are_plain(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float, str)) for value in values)
