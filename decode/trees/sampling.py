"""From the target's logits to the probabilities that tokens are drawn from.

Shapes: B rows, L tokens of a prefix, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
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

from decode.devices.attention import HALVES
from decode.devices.transfer import waits
from decode.requests.numbers import describe, read_number, read_whole
from decode.trees.processors import Processors, apply_processors, draft_processors

LOWEST_TEMPERATURE = 1e-30  # scores that are divided by less could overflow in float32
TOP = 1024  # tokens that `FastTopP` sorts before it sorts all
NO_TOKEN = -1  # instead of a drawn token, where logits are NaN or infinite


def upcast_half(logits: Tensor) -> Tensor:
    """Half precision as float32: top-p and sampling need more digits, and a CPU's argmax is slow in half precision."""
    return logits.float() if logits.dtype in HALVES else logits


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
    greedy: whether the temperature is 0; it follows from that.

    None stands for a default. Numbers may be numpy's or torch's. Raises TypeError for anything else than a number, and
    ValueError if it is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    processors: Processors = ()
    seed: int | None = None
    greedy: bool = field(init=False, repr=False, compare=False)

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
        object.__setattr__(self, "greedy", self.temperature == 0)
        if self.seed is None and not self.greedy:
            object.__setattr__(self, "seed", int(torch.randint(1 << 62, ())))

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
        for warper in self.warpers:  # they need no prefix
            scores = warper(None, scores)
        return scores.double().softmax(dim=-1)

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
