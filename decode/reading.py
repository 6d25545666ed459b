"""Reading prompts: in parts while other requests are decoded, and only what no other text has.

Shapes: B rows, T tokens, V vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.prefill import Fuse, Read, Text, find_unique, read_in_parts
from decode.request import Request
from decode.requests.answer import Seconds
from decode.session import Session


class Reading:
    """Prompts while they are read, at most so many tokens of all in a pass. Equal ones are read once.

    open: makes an empty session, see `Batch.open`. find: finds a prompt's beginning that is computed already. fuse: as
    in `decode.prefill`. rows: each request's row of the session. seconds: that reading has taken.
    """

    def __init__(
        self,
        requests: list[Request],
        open: Callable[[int, bool, Any], Session],
        find: Callable[[list[int]], Text | None],
        fuse: Fuse | None,
        most: int,
    ) -> None:
        self.requests, self.seconds, call = requests, Seconds(), requests[0].call
        self._inputs = None if call is None else call.find_inputs([request.request_id for request in requests])
        prompts, self.rows = [request.sequence for request in requests], [*range(len(requests))]
        if self._inputs is None:
            prompts, self.rows = find_unique(prompts)
        self._count = len(prompts)
        self.session = open(self._count, self.is_whole, self._inputs)
        self._known = [find(prompt) if self._inputs is None else None for prompt in prompts]
        for row, text in enumerate(self._known):
            if text is not None:
                self.session.copy_from(text.session, row, text.row, len(text.tokens))
        for request, row in zip(requests, self.rows, strict=True):
            request.stats.reused += self.session.lengths[row]
        self._unread = [prompt[length:] for prompt, length in zip(prompts, self.session.lengths, strict=True)]
        if self._inputs is not None:
            self._unread = self._inputs.begin(self.session)
        self._parts = read_in_parts(self.session, self._unread, fuse, most)
        self.seconds.lap("target")

    @property
    def tokens(self) -> int:
        """The tokens that are read."""
        return sum(self.session.lengths)

    @property
    def is_whole(self) -> bool:
        """Whether the session has a row for each request, in order."""
        return self.rows == [*range(self._count)]

    def read_part(self) -> tuple[Read | None, float]:
        """Read on. Returns the result for each request once all is read, and the seconds that the part took."""
        before, self.seconds.started = self.seconds.target, perf_counter()
        if (read := next(self._parts)) is not None:
            self._parts.close()  # which frees what it holds
            logits, features = read if self._inputs is None else self._inputs.finish(self._unread, read)
            features = None if features is None else self._join_features(features)
            if not self.is_whole:
                index = torch.tensor(self.rows, device=logits.device)
                logits, features = logits[index], None if features is None else features[index]
            read = logits, features
        self.seconds.lap("target")
        return read, self.seconds.target - before

    def _join_features(self, features: Tensor) -> Tensor:
        """The features of whole prompts, from those [B, T, F] of the tokens that were read."""
        if not any(self._known):
            return features
        known: list[Sequence[Tensor]] = [text.features if text is not None else [] for text in self._known]
        return pad_sequence(
            [torch.cat([*parts, row]) for parts, row in zip(known, features, strict=True)], batch_first=True
        )

    def keep_running(self) -> bool:
        """Go on without the requests that have ended. Returns whether others are left."""
        pairs = [pair for pair in zip(self.requests, self.rows, strict=True) if pair[0].finish is None]
        self.requests, self.rows = [request for request, _ in pairs], [row for _, row in pairs]
        return bool(pairs)
