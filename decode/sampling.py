"""From the target's logits to the law that tokens are drawn from.

Shapes: B rows, L tokens of a prefix, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

SORTED = 1024  # tokens that top-p looks at before it looks at all


def widen(logits: Tensor) -> Tensor:
    """Half precision as float32: it would round away what top-p and the draw depend on, and its argmax is slow."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


class QuickTopP(TopPLogitsWarper):
    """The same in a tenth of the time on a CPU: a few tokens nearly always hold that much, and no others are sorted.

    A row is sorted whole where they do not, and where tokens tie at the border: which of them stay is for transformers
    to say.
    """

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        if scores.device.type != "cpu" or scores.shape[-1] <= SORTED:
            return super().__call__(input_ids, scores)
        likeliest, tokens = scores.softmax(dim=-1).topk(SORTED, dim=-1)
        kept = likeliest.cumsum(dim=-1) - likeliest < self.top_p  # what is likelier than each does not suffice
        count = kept.sum(dim=-1, keepdim=True)
        border = likeliest.gather(-1, torch.cat([count - 1, count.clamp(max=SORTED - 1)], dim=-1))
        unsure = border[:, 0] == border[:, 1]  # the last that stays and the first that goes, or all stay
        result = torch.full_like(scores, -torch.inf)
        result.scatter_(-1, tokens, scores.gather(-1, tokens).masked_fill(~kept, -torch.inf))
        if bool(unsure.any()):
            result[unsure] = super().__call__(input_ids, scores[unsure])
        return result


class RowProcessor(LogitsProcessor):
    """A logits processor that treats prompts differently: it is told whose prefix it sees, by the prompt's number."""

    def __call__(self, input_ids: Tensor, scores: Tensor, row: int) -> Tensor:
        raise NotImplementedError


class WithinAnswers(RowProcessor):
    """Processors that are asked about answers up to their ends. Guesses may go on behind those, where plain decoding
    would ask nothing, and a grammar may have no answer.

    begins: where the answer to each prompt begins, by the prompt's number. most: tokens of an answer.
    """

    def __init__(
        self, processors: Sequence[LogitsProcessor], begins: Mapping[int, int], stop_ids: Iterable[int], most: int
    ) -> None:
        self.processors, self.begins, self.most = processors, begins, most
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.long)

    def __call__(self, input_ids: Tensor, scores: Tensor, row: int) -> Tensor:
        answer = input_ids[0, self.begins[row] :]
        if len(answer) >= self.most or bool(torch.isin(answer, self.stop_ids.to(answer.device)).any()):
            return scores
        return process(self.processors, input_ids, scores, row)


def process(processors: Sequence[LogitsProcessor], input_ids: Tensor, scores: Tensor, row: int) -> Tensor:
    """What processors make of the scores [1, V] behind a prefix [1, L] of a prompt, called by its number."""
    for processor in processors:
        told = {"row": row} if isinstance(processor, RowProcessor) else {}
        scores = processor(input_ids, scores, **told)
    return scores


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The defaults are greedy decoding.

    temperature 0 takes the likeliest token; `top_k` 0, `top_p` 1 and `min_p` 0 are off. `processors` are any of
    transformers' logits processors; each is called with a row's own prefix (prompt, answer and guesses up to that
    node). The same `seed` gives the same text with every deterministic proposer and in every batch; without one it is
    taken from torch's generator, so `torch.manual_seed` holds.

    Raises ValueError for settings out of range.
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
        """Temperature, top-k, top-p and min-p in transformers' own order; they look at a row's logits alone."""
        warpers = LogitsProcessorList()
        if self.greedy:
            return warpers
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(QuickTopP(self.top_p))
        if self.min_p:
            warpers.append(MinPLogitsWarper(self.min_p))
        return warpers

    def probabilities(self, logits: Tensor, prefixes: Sequence[Tensor | None] = (), rows: Sequence[int] = ()) -> Tensor:
        """The law of the next token, [B, V] float64, rows summing to one.

        logits [B, V]; prefixes: each row's tokens so far, [L] each, or None where the law will not be looked at;
        rows: the number of each row's prompt. Both are needed only where there are processors.
        """
        scores = widen(logits)
        if self.processors:
            numbers = rows or range(len(scores))
            seen = zip(prefixes, scores, numbers, strict=True)
            scores = torch.stack([row if prefix is None else self._process(prefix, row, n) for prefix, row, n in seen])
        if self.greedy:
            return torch.nn.functional.one_hot(scores.argmax(dim=-1), scores.shape[-1]).double()
        return self.warpers(None, scores).double().softmax(dim=-1)

    def _process(self, prefix: Tensor, scores: Tensor, row: int) -> Tensor:
        return process(self.processors, prefix[None], scores[None].clone(), row)[0]  # they may write into what they get
