"""transformers' logits processors as a `Sampling`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decode.hf.prompts import Prompts
from decode.sampling import RequestProcessor, Sampling, draft_processors

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
    if others:
        copies = config.num_return_sequences or 1
        rows = [[_select_row(processor, row, copies) for processor in others] for row in range(len(prompts.tokens))]
        others = [_RowWise(rows, prompts)]
    return Sampling(processors=others, **settings)


class _RowWise(RequestProcessor):
    """Logits processors made for a padded batch, called for one row at a time."""

    def __init__(self, rows: Sequence[Sequence[LogitsProcessor]], prompts: Prompts) -> None:
        self.rows, self.prompts = rows, prompts

    def __call__(self, input_ids: Tensor, scores: Tensor, request_id: int) -> Tensor:
        padded = self.prompts.pad(request_id, input_ids[0])
        for processor in self.rows[request_id]:
            scores = processor(padded, scores)
        return scores

    def for_drafts(self) -> _RowWise:
        return _RowWise([draft_processors(row) for row in self.rows], self.prompts)


def _select_row(processor: LogitsProcessor, row: int, copies: int) -> LogitsProcessor:
    """A processor for one row, if it holds something for each row of the batch. copies: rows of the same prompt."""
    own = copy(processor)
    if isinstance(own, RepetitionPenaltyLogitsProcessor) and isinstance(own.prompt_ignore_length, Tensor):
        own.prompt_ignore_length = own.prompt_ignore_length[row : row + 1]
    elif isinstance(own, PrefixConstrainedLogitsProcessor):
        allowed = own._prefix_allowed_tokens_fn
        own._prefix_allowed_tokens_fn = lambda _, tokens: allowed(row, tokens)
    elif isinstance(own, EncoderRepetitionPenaltyLogitsProcessor):
        own.encoder_input_ids = own.encoder_input_ids[row // copies][None]
    elif isinstance(own, EncoderNoRepeatNGramLogitsProcessor):
        own.generated_ngrams, own.batch_size = own.generated_ngrams[row // copies :][:1], 1
    return own
