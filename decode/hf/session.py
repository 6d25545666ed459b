"""A session for one `generate` call: it starts from any prompts that transformers takes, and records what is kept.

Shapes: B rows, N nodes, T tokens, S slots of the KV cache, V vocabulary, C columns of the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.hf.kv_states import RowStates, load_rows, read_cache, read_rows
from decode.hf.prompts import PLACEHOLDER, Prompts
from decode.models.cost_curve import CONTEXTS, CostCurve
from decode.models.stock_model import StockModel
from decode.recurrent import StateCache, StateSession
from decode.session import Fuse, Read, Session, Verdict, run_through
from decode.target import Target
from decode.trees.sampling import Sampling
from decode.trees.tree import Tree


@dataclass(frozen=True)
class Recording:
    """What a session records."""

    states: bool = False
    logits: bool = False


class PromptTarget(Target):
    """A target whose `open` starts from the prompts of one `generate` call. `session` is what it opened."""

    session: PromptSession

    def __init__(self, target: Target, prompts: Prompts, recording: Recording) -> None:
        vars(self).update(vars(target))
        self._target, self._prompts, self._recording = target, prompts, recording

    @property
    def context(self) -> int:
        """The context length, less the positions that the prompts have beyond their tokens."""
        return super().context - self._prompts.extra_positions

    def cost_curve(self, batch_size: int = 1, context: int = CONTEXTS[0]) -> CostCurve:
        return self._target.cost_curve(batch_size, context)  # measured without these prompts

    def open(self, batch_size: int, layers: Sequence[int] = ()) -> Session:
        if self.is_recurrent and self._prompts.hidden is not None:
            raise ValueError(
                f"{self.config.model_type} keeps a recurrent state, from which no column in a prompt can be hidden; "
                "attention_mask may have zeros on the left only, and position_ids must count from there"
            )
        is_special = self._prompts.embeddings is not None or self._prompts.token_types is not None
        if self.is_recurrent and is_special and len(set(self._prompts.first.tolist())) > 1:
            raise ValueError(
                f"{self.config.model_type} keeps a recurrent state, so rows of embeddings or with token types must be "
                "equally long; give one at a time"
            )
        kind = PromptStateSession if self.is_recurrent else PromptSession
        self.session = kind(self._target, layers, self._prompts, self._recording)
        return self.session


class PromptSession(Session):
    """Reads prompts as `Prompts` describes them.

    It records `states`, the keys and values of rows that have left the batch, and `logits`, those of each row's kept
    nodes. Both are by the row's number in the whole batch.
    """

    def __init__(self, target: StockModel, layers: Sequence[int], prompts: Prompts, recording: Recording) -> None:
        super().__init__(target, len(prompts.tokens), layers)
        self.prompts, self.recording = prompts, recording
        self.rows = list(range(len(prompts.tokens)))  # those that are still in the batch
        self.states: dict[int, RowStates] = {}
        self.logits: dict[int, list[Tensor]] = {row: [] for row in self.rows}
        self._tree_logits: Tensor | None = None  # [B, N, V] of the last tree; None while the prompts are read

    def extend(self, tokens: Sequence[Sequence[int]], fuse: Fuse | None = None) -> Read:
        """Read the prompts. Returns the logits after each one [B, V] and its tokens' features, fused if asked for."""
        result = super().extend(tokens, fuse) if self.prompts.are_plain else self._read_prompts(fuse)
        self._tree_logits = result[0][:, None]
        self._record_logits([[0]] * len(self.rows))
        return result

    def _read_prompts(self, fuse: Fuse | None) -> Read:
        prompts, past = self.prompts, self.prompts.past
        if self.layers and prompts.unknown == 0:
            past = 0  # a head drafts from the features of all tokens, so they are computed once more
        begins = prompts.first.clamp(min=past).tolist()
        lengths = [begin - first for begin, first in zip(begins, prompts.first.tolist(), strict=True)]
        if prompts.cache is not None and past:
            states = read_cache(prompts.cache, past, [min(first, past) for first in prompts.first.tolist()])
            load_rows(self.cache, states, lengths, self.target.device)
            if isinstance(self.cache, StateCache):
                self.cache.load_states(prompts.cache)
        rows = [
            ([PLACEHOLDER] * (prompts.columns - len(row)) + row)[begin:]
            for begin, row in zip(begins, prompts.tokens, strict=True)
        ]
        logits, features = run_through(self.read(rows, fuse))
        if features is None:
            return logits, None
        ends = [
            each[: len(row)][-len(tokens) :] for each, row, tokens in zip(features, rows, prompts.tokens, strict=True)
        ]
        return logits, pad_sequence(ends, batch_first=True)

    def _needs_no_mask(self, tree: Tree, start: int) -> bool:
        return self.prompts.are_plain and super()._needs_no_mask(tree, start)

    def _count_seen(self) -> int:
        return super()._count_seen() if self.prompts.are_plain else 0

    def _model_inputs(self, tree: Tree, start: int, lengths: Tensor) -> dict[str, Any]:
        inputs, prompts = super()._model_inputs(tree, start, lengths), self.prompts
        if prompts.hidden is None and prompts.token_types is None and prompts.embeddings is None:
            return inputs
        device = lengths.device
        first = prompts.first[self.rows].to(device)[:, None]
        column = lengths[:, None] + first + tree.depth[:, start:]  # [B, N]
        inside = column.clamp(max=prompts.columns - 1)
        if prompts.hidden is not None:
            positions = prompts.positions[self.rows].to(device).gather(1, inside) + column - inside
            inputs["position_ids"] = positions.clamp(max=self.target.context - 1)
            inputs["attention_mask"] = self._hide(inputs["attention_mask"])
        if prompts.token_types is not None:  # new tokens get the last one, as in transformers
            inputs["token_type_ids"] = prompts.token_types[self.rows].to(device).gather(1, inside)
        if prompts.embeddings is not None and self._tree_logits is None:
            embeddings = prompts.embeddings[self.rows].to(device)
            del inputs["input_ids"]
            inputs["inputs_embeds"] = embeddings.take_along_dim(inside[:, :, None], dim=1)
        return inputs

    def _hide(self, masks: Any) -> Any:
        """The masks [B, 1, N, S], or a dict of them, without the columns that the prompts hide."""
        if isinstance(masks, dict):
            return {kind: self._hide(mask) for kind, mask in masks.items()}
        assert self.prompts.hidden is not None
        hidden = self.prompts.hidden[self.rows].to(masks.device)  # columns are slots: none is dropped
        missing = masks.shape[3] - hidden.shape[1]
        hidden = torch.nn.functional.pad(hidden, (0, max(missing, 0)))[:, : masks.shape[3]]
        return masks.masked_fill(hidden[:, None, None], torch.finfo(masks.dtype).min)

    def verify(
        self, tree: Tree, *, start: int = 0, only: Sequence[int] | None = None, sampling: Sampling | None = None
    ) -> Verdict:
        verdict = super().verify(tree, start=start, only=only)
        if self._tree_logits is not None:
            self._tree_logits = verdict.logits
        return verdict

    def keep(self, path: Sequence[Sequence[int]]) -> None:
        super().keep(path)
        self._record_logits(path)

    def _record_logits(self, path: Sequence[Sequence[int]]) -> None:
        if self.recording.logits and self._tree_logits is not None:
            for row, nodes, logits in zip(self.rows, path, self._tree_logits, strict=True):
                self.logits[row].append(logits[nodes].float())

    def select(self, rows: Sequence[int]) -> None:
        if self.recording.states:
            self._record_states([index for index in range(len(self.rows)) if index not in set(rows)])
        super().select(rows)
        self.rows = [self.rows[index] for index in rows]

    def close(self) -> None:
        """Record the states of the rows that are left."""
        if self.recording.states:
            self._record_states(range(len(self.rows)))
        self.rows = []

    def _record_states(self, indices: Sequence[int]) -> None:
        self._move_now()
        for index, states in zip(indices, read_rows(self.cache, indices), strict=True):
            self.states[self.rows[index]] = states

    def resume(self, rows: Sequence[RowStates], lengths: Sequence[int]) -> None:
        """Continue, in an empty session, from the states of rows whose prompts were read before."""
        load_rows(self.cache, rows, lengths, self.target.device)
        self._tree_logits = torch.empty(0)


class PromptStateSession(PromptSession, StateSession):
    """The same for a target with a recurrent state. It records nothing: `make_output` runs the model once more."""

    def _record_states(self, indices: Sequence[int]) -> None:
        pass

    def _record_logits(self, path: Sequence[Sequence[int]]) -> None:
        pass
