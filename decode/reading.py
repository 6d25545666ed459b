"""Reading prompts: in parts while other requests are decoded, and only what no other text has.

Shapes: T tokens, F feature width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.models.stock_model import StockModel
from decode.request import Request
from decode.session import Fuse, Read, Session, find_unique
from decode.stats import Seconds

SHORTEST = 16  # tokens; copying fewer saves nothing


@dataclass(frozen=True)
class Text:
    """A text whose keys and values are in a row of a session, and the features [T, F] of its tokens, in parts."""

    tokens: tuple[int, ...]
    session: Session
    row: int
    features: Sequence[Tensor]  # empty if the proposer needs none

    def first(self, length: int) -> Text:
        """Its first tokens."""
        features = [torch.cat([*self.features])[:length]] if self.features else []
        return replace(self, tokens=self.tokens[:length], features=features)

    def copy(self) -> Text:
        """The same in a session of its own."""
        session = self.session.open(0)
        session.join(self.session, [self.row])
        session.rewind(0, len(self.tokens))
        return Text(self.tokens, session, 0, self.first(len(self.tokens)).features)

    @property
    def states(self) -> list[Tensor]:
        """The keys and values of all rows of its session."""
        return [states for block in self.session.cache.blocks for states in (block.keys, block.values)]

    @property
    def bytes(self) -> int:
        """That are allocated for it, in a session of its own."""
        states = self.session.count_state_bytes(self.row)
        return states + sum(tensor.nbytes for tensor in (*self.states, *self.features))

    @property
    def least_bytes(self) -> int:
        """That it needs in a session of its own."""
        own = [states[:, :1, :, : len(self.tokens)] for states in self.states]
        states = self.session.count_state_bytes(self.row)
        return states + sum(tensor.nbytes for tensor in (*own, *self.features))


class Prefixes:
    """Texts that have ended, at most so many bytes of them. Those that were not used for longest go first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._texts: OrderedDict[tuple[int, ...], Text] = OrderedDict()

    @property
    def bytes(self) -> int:
        return sum(text.bytes for text in self._texts.values())

    def add(self, text: Text) -> None:
        """Keep a copy of a text, as far as its row can go back. Others that it begins with are dropped."""
        length = text.session.find_beginning(text.row, len(text.tokens))
        text = text if length == len(text.tokens) else text.first(length)
        if len(text.tokens) < SHORTEST or text.least_bytes > self.most:
            return
        for tokens in [tokens for tokens in self._texts if text.tokens[: len(tokens)] == tokens]:
            del self._texts[tokens]
        self._texts[text.tokens] = text.copy()
        while self.bytes > self.most:
            self._texts.popitem(last=False)

    def clear(self) -> None:
        """Drop all texts."""
        self._texts.clear()

    def find(self, prompt: Sequence[int], running: Iterable[Text]) -> Text | None:
        """The longest beginning of a prompt, but for its last token, that any text has; None if it is too short."""
        known = [(count_common(text.tokens, prompt[:-1]), text) for text in (*running, *self._texts.values())]
        found = [(text.session.find_beginning(text.row, length), text) for length, text in known]
        length, text = max(found, key=lambda pair: pair[0], default=(0, None))
        if text is None or length < SHORTEST:
            return None
        if text.tokens in self._texts:
            self._texts.move_to_end(text.tokens)
        return text.first(length)


def count_common(text: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common before they differ."""
    size = min(len(text), len(other))
    return next((place for place in range(size) if text[place] != other[place]), size)


class Reading:
    """Prompts that are read in a session of their own, `part` tokens in a pass. Equal ones are read once.

    layers, fuse: as in `Session`. rows: each request's row of the session. find: finds a prompt's beginning that is
    computed already.
    """

    def __init__(
        self,
        target: StockModel,
        requests: list[Request],
        layers: Sequence[int],
        fuse: Fuse | None,
        part: int,
        find: Callable[[list[int]], Text | None],
    ) -> None:
        prompts, self.rows = find_unique([request.prompt for request in requests])
        self.requests, self.session = requests, Session(target, len(prompts), layers)
        self.seconds = Seconds()
        self._known = [find(prompt) for prompt in prompts]
        with self.seconds.measure("target"):
            for row, text in enumerate(self._known):
                if text is not None:
                    self.session.copy_from(text.session, row, text.row, len(text.tokens))
        for request, row in zip(requests, self.rows, strict=True):
            request.stats.reused = self.session.lengths[row]
        unread = [prompt[length:] for prompt, length in zip(prompts, self.session.lengths, strict=True)]
        self._parts = self.session.read(unread, fuse, part)

    @property
    def tokens(self) -> int:
        """The tokens that are read."""
        return sum(self.session.lengths)

    def read_part(self) -> tuple[Read | None, float]:
        """Read on. Returns the result for each request once all is read, and the seconds that the part took."""
        begun, read = perf_counter(), None
        try:
            next(self._parts)
        except StopIteration as end:
            logits, features = end.value
            features = None if features is None else self._join_features(features)
            index = torch.tensor(self.rows, device=logits.device)
            read = logits[index], None if features is None else features[index]
        seconds = perf_counter() - begun
        self.seconds.target += seconds
        return read, seconds

    def _join_features(self, features: Tensor) -> Tensor:
        """The features of whole prompts, from those [B, T, F] of the tokens that were read."""
        if not any(self._known):
            return features
        known = [[*text.features] if text is not None else [] for text in self._known]
        return pad_sequence(
            [torch.cat([*parts, row]) for parts, row in zip(known, features, strict=True)], batch_first=True
        )

    def keep_running(self) -> bool:
        """Go on without the requests that have ended. Returns whether others are left."""
        pairs = [pair for pair in zip(self.requests, self.rows, strict=True) if pair[0].finish is None]
        self.requests, self.rows = [request for request, _ in pairs], [row for _, row in pairs]
        return bool(pairs)
