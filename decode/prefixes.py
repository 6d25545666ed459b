"""Texts whose keys, values and features are known: a prompt that begins like one of them is read from there on.

Shapes: T tokens, F feature width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decode.session import Session

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
