"""The prompts of a `generate` call: which columns of its batch are computed, and where they stand.

Shapes: B rows, C columns of a prompt (those of a user's cache included), L columns of `input_ids`, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from decode.hf.kv_states import check_cache, count_cached
from decode.models.compatibility import CACHE_NAMES
from decode.target import Target

PLACEHOLDER = 0  # stands for a prompt whose tokens are unknown


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts.

    Padding on the left is dropped. If a row has other masked columns or positions of its own, all rows keep all
    columns, as in transformers, and `hidden` says which ones are not attended to.
    """

    tokens: list[list[int]]  # of each row, for proposers and processors; a placeholder if none is known
    padding: list[Tensor]  # the dropped tokens before them
    first: list[int]  # of each row, the first column that is computed
    positions: Tensor  # [B, C]
    hidden: Tensor | None  # [B, C] bool
    token_types: Tensor | None  # [B, C]
    embeddings: Tensor | None  # [B, C, H]
    cache: Cache | None
    past: int  # columns in the cache
    unknown: int  # columns without a token

    @property
    def columns(self) -> int:
        return self.positions.shape[1]

    @property
    def real(self) -> Tensor:
        """Which columns are attended to, [B, C] bool."""
        column = torch.arange(self.columns, device=self.positions.device)
        first = torch.tensor(self.first, device=column.device)
        return column >= first[:, None] if self.hidden is None else ~self.hidden

    @property
    def are_plain(self) -> bool:
        """Whether the prompts are token ids alone: no cache, no masked columns inside, no other inputs."""
        special = self.hidden, self.token_types, self.embeddings
        return self.past == 0 and all(each is None for each in special)

    @property
    def extra_positions(self) -> int:
        """How much further the positions go than the tokens, in the worst row."""
        last = (self.positions[:, -1] + 1).tolist()
        return max(0, *(position - len(row) for position, row in zip(last, self.tokens, strict=True)))

    def pad(self, row: int, tokens: Sequence[int] | Tensor) -> Tensor:
        """A row's tokens [1, n] as transformers shows them to processors: with padding, without a placeholder."""
        padding, begin = self.padding[row], int(self.unknown == self.columns)  # after a placeholder
        shown = torch.as_tensor(tokens, dtype=padding.dtype, device=padding.device)[begin:]
        return torch.cat([padding, shown])[None]


def read_prompts(input_ids: Tensor, inputs: dict[str, Any], config: GenerationConfig) -> Prompts:
    """The prompts in the arguments that transformers' `generate` passes on.

    Raises ValueError for an empty prompt, a cache that cannot be continued, and shapes that do not fit together.
    """
    caches = [inputs[name] for name in CACHE_NAMES if inputs.get(name) is not None]
    cache, embeddings = next(iter(caches), None), inputs.get("inputs_embeds")
    past = 0 if cache is None else count_cached(cache)
    if past or getattr(cache, "_is_user_defined", False):
        check_cache(cache, len(input_ids))
    real = _read_mask(input_ids, inputs, past, config)
    columns, known = real.shape[1], input_ids.shape[1]
    if past >= columns:
        raise ValueError(f"the cache holds {past} tokens; the prompt of {columns} needs at least one more")
    default = (real.cumsum(dim=1) - 1).masked_fill(~real, 0)
    positions = _read_columns("position_ids", inputs, real)
    positions = default if positions is None else positions
    moved = (positions != default) & real
    moved[:, : columns - known] &= embeddings is not None  # transformers may not know the positions of cached tokens
    is_plain = not bool((real[:, 1:] < real[:, :-1]).any()) and not bool(moved.any())
    first: list[int] = (~real).sum(dim=1).tolist() if is_plain else [0] * len(real)
    rows = [(ids, max(begin - (columns - known), 0)) for ids, begin in zip(input_ids, first, strict=True)]
    return Prompts(
        tokens=[ids[count:].tolist() or [PLACEHOLDER] for ids, count in rows],
        padding=[ids[:count] for ids, count in rows],
        first=first,
        positions=default if is_plain else positions,
        hidden=None if is_plain else ~real,
        token_types=_read_columns("token_type_ids", inputs, real),
        embeddings=embeddings,
        cache=cache,
        past=past,
        unknown=columns - known,
    )


def refuse_prompts(target: Target, prompts: Prompts) -> None:
    """Raise ValueError for prompts that the target cannot start from."""
    if target.is_recurrent and prompts.hidden is not None:
        raise ValueError(
            f"{target.config.model_type} keeps a recurrent state, from which no column in a prompt can be hidden; "
            "attention_mask may have zeros on the left only, and position_ids must count from there"
        )
    if max(map(len, prompts.tokens)) + prompts.extra_positions >= target.context:
        raise ValueError(f"the prompts leave no room for an answer in the model's context of {target.context} tokens")


def _read_mask(input_ids: Tensor, inputs: dict[str, Any], past: int, config: GenerationConfig) -> Tensor:
    """Which columns are not masked, [B, C] bool."""
    embeddings, mask = inputs.get("inputs_embeds"), inputs.get("attention_mask")
    batch, known = input_ids.shape
    if embeddings is not None:
        columns = embeddings.shape[1]
    else:
        # With a cache, transformers takes the whole text or, if the mask is longer, its new tokens alone.
        length = mask.shape[1] if mask is not None else getattr(config, "_mask_length", known)
        columns = past + known if past and length != known else known
    if columns == 0:
        raise ValueError("the prompt is empty; it needs at least one token")
    if mask is None:
        return torch.ones(batch, columns, dtype=torch.bool, device=input_ids.device)
    if mask.shape[1] != columns:
        raise ValueError(f"attention_mask has {mask.shape[1]} columns; the prompt has {columns}")
    real = mask.to(input_ids.device) != 0
    if not bool(real.any(dim=1).all()):
        raise ValueError("attention_mask leaves a prompt empty; it needs at least one token")
    return real


def _read_columns(name: str, inputs: dict[str, Any], real: Tensor) -> Tensor | None:
    """A model input with a value for each column, [B, C]; zeros for columns before its own."""
    values = inputs.get(name)
    if values is None:
        return None
    batch, columns = real.shape
    if values.ndim != 2 or values.shape[0] not in (1, batch) or values.shape[1] > columns:
        raise ValueError(f"{name} has shape {tuple(values.shape)}; expected [{batch}, {columns}]")
    missing = columns - values.shape[1]
    return torch.nn.functional.pad(values.to(real.device), (missing, 0)).expand(batch, -1)


def extend_columns(values: Tensor, count: int, step: int) -> Tensor:
    """Values for `count` more columns [B, C + count], as transformers adds them: the last one plus `step` for each."""
    more = step * torch.arange(1, count + 1, device=values.device)
    return torch.cat([values, values[:, -1:] + more], dim=1)
