"""One `generate` call: what its requests have besides their tokens, and what is recorded of them.

Shapes: B rows, N nodes, T tokens, S slots of the KV cache, F feature width, V vocabulary, C columns of the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from decode.hf.kv_states import load_cache
from decode.hf.prompts import PLACEHOLDER, Prompts
from decode.prefill import Read
from decode.session import Session


class GenerateCall:
    """The call that some requests belong to. A request's id is its row in the prompts.

    ended: a session for each row that has ended. logits: after each row's tokens, as they came. Both are recorded if
    they are asked for.
    """

    def __init__(self, prompts: Prompts, keeps_rows: bool, keeps_logits: bool) -> None:
        self.prompts, self.keeps_rows, self.keeps_logits = prompts, keeps_rows, keeps_logits
        self.ended: dict[int, Session] = {}
        self.logits: list[list[Tensor]] = [[] for _ in prompts.tokens]

    def find_inputs(self, rows: Sequence[int]) -> PromptInputs | None:
        """The inputs of some rows; None if the prompts are tokens alone."""
        return None if self.prompts.are_plain else PromptInputs(self.prompts, rows)

    def record_logits(self, row: int, logits: Tensor) -> None:
        """Take the logits [n, V] that a row's next tokens were chosen by."""
        if self.keeps_logits:
            self.logits[row].append(logits.float())

    def record_row(self, row: int, session: Session, place: int) -> None:
        """Copy what is committed of a row that has ended, from its place in a session."""
        if self.keeps_rows:
            self.ended[row] = session.open(0)
            self.ended[row].join(session, [place])


class PromptInputs:
    """What the rows of a session have as inputs besides their tokens. rows: where they are in the prompts."""

    def __init__(self, prompts: Prompts, rows: Sequence[int]) -> None:
        self.prompts, self.rows = prompts, list(rows)

    def select(self, places: Sequence[int]) -> PromptInputs:
        """Those of some rows of the session."""
        return PromptInputs(self.prompts, [self.rows[place] for place in places])

    def join(self, other: PromptInputs) -> PromptInputs:
        """Those of the rows of two sessions."""
        return PromptInputs(self.prompts, self.rows + other.rows)

    def begin(self, session: Session) -> list[list[int]]:
        """Load a user's cache into an empty session. Returns the tokens that are left to be read, of each row."""
        prompts, first = self.prompts, [self.prompts.first[row] for row in self.rows]
        # A head drafts from the features of all tokens, so known ones are computed once more.
        past = 0 if session.layers and prompts.unknown == 0 else prompts.past
        if prompts.cache is not None and past:
            load_cache(session.cache, prompts.cache, past, self.rows, first)
            if session.states is not None:
                session.states.load(prompts.cache, self.rows)
        rows = [prompts.tokens[row] for row in self.rows]
        return [
            ([PLACEHOLDER] * (prompts.columns - len(row)) + row)[max(begin, past) :]
            for begin, row in zip(first, rows, strict=True)
        ]

    def finish(self, unread: Sequence[Sequence[int]], read: Read) -> Read:
        """The result of reading what `begin` has returned, with the features of the prompts' tokens alone."""
        logits, features = read
        if features is None:
            return read
        counts = [len(self.prompts.tokens[row]) for row in self.rows]
        parts = [each[: len(row)][-count:] for each, row, count in zip(features, unread, counts, strict=True)]
        return logits, pad_sequence(parts, batch_first=True)

    def rewrite(self, inputs: dict[str, Any], session: Session, lengths: Tensor, depth: Tensor) -> dict[str, Any]:
        """The model's inputs for nodes of some `depth` [B, N] after `lengths` [B] committed tokens."""
        prompts, device, first = self.prompts, lengths.device, [self.prompts.first[row] for row in self.rows]
        is_reading = any(
            begin + length < prompts.columns for begin, length in zip(first, session.cache.lengths, strict=True)
        )
        column = lengths[:, None] + torch.tensor(first).to(device)[:, None] + depth  # [B, N]
        inside = column.clamp(max=prompts.columns - 1)
        if prompts.hidden is not None:
            positions = prompts.positions[self.rows].to(device).gather(1, inside) + column - inside
            inputs["position_ids"] = positions.clamp(max=session.target.context - 1)
            inputs["attention_mask"] = self._hide(inputs["attention_mask"])
        if prompts.token_types is not None:  # new tokens get the last one, as in transformers
            inputs["token_type_ids"] = prompts.token_types[self.rows].to(device).gather(1, inside)
        if prompts.embeddings is not None and is_reading:
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
        hidden = nn.functional.pad(hidden, (0, max(missing, 0)))[:, : masks.shape[3]]
        return masks.masked_fill(hidden[:, None, None], torch.finfo(masks.dtype).min)
