"""Reading texts into a session, some tokens of each in a forward pass, but for beginnings that are known already.

Shapes: B rows, T tokens (padded to the longest row), V vocabulary, F feature width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.kv_cache import GROWTH
from decode.models.stock_model import StockModel
from decode.recurrent import EVERY
from decode.session import Session
from decode.trees.tree import Tree

CHUNK = 512  # tokens of a row in a forward pass, if not more pay (`choose_chunk`)
MASK_BYTES = 1 << 28  # of a mask in it
GROUP = 16  # rows that are read together at most ...
ALIKE = 32  # ... whose lengths differ by less than this, because padding costs as much as tokens
SHORTEST = 16  # tokens; copying fewer saves nothing
Fuse: TypeAlias = Callable[[Tensor], Tensor]  # from features [B, T, F] to what a proposer needs of them, [B, T, *]
# The logits after each text [B, V], and its tokens' features [B, T, *].
Read: TypeAlias = tuple[Tensor, Tensor | None]


def read_texts(session: Session, tokens: Sequence[Sequence[int]], fuse: Fuse | None = None) -> Read:
    """`read_in_parts` without a pause."""
    *_, read = read_in_parts(session, tokens, fuse)
    assert read is not None
    return read


def read_in_parts(
    session: Session, tokens: Sequence[Sequence[int]], fuse: Fuse | None = None, most: int | None = None
) -> Generator[Read | None, None, None]:
    """Commit tokens at the end of each row, at least one each. Yields None between passes over some tokens of each.

    Then it yields the logits after each row's last token, and the features of all new tokens, or what `fuse` makes of
    them, pass by pass. Rows with tokens of different lengths are read in groups. After it, no row has given tokens.
    most: tokens of all rows in a pass; None takes as many as are fastest.
    """
    counts = [*map(add, session.count_given(), map(len, tokens))]
    if max(counts) < ALIKE:
        groups = [[*range(len(tokens))]]
    else:
        groups = group_by_length(counts, ALIKE if session.states is None else 1)
    if len(groups) == 1 and session.steps is None:
        yield (yield from _read_group(session, tokens, fuse, most))
        return
    logits, features = [torch.empty(0)] * len(tokens), [torch.empty(0)] * len(tokens)
    for rows in groups:
        part = session.open(0)
        part.join(session, rows)
        found, states = yield from _read_group(part, [tokens[row] for row in rows], fuse, most)
        session.replace(rows, part, range(len(rows)))
        for place, row in enumerate(rows):
            logits[row] = found[place]
            if states is not None:
                features[row] = states[place, : len(tokens[row])]
    yield torch.stack(logits), pad_sequence(features, batch_first=True) if session.layers else None


def _read_group(
    session: Session, tokens: Sequence[Sequence[int]], fuse: Fuse | None, most: int | None
) -> Generator[None, None, Read]:
    logits: list[Tensor] = [torch.empty(0)] * len(tokens)
    longest, features = max(map(len, tokens)), torch.empty(0)
    chunk = choose_chunk(session.target, len(tokens), longest + max(session.lengths))
    chunk = chunk if most is None else min(chunk, max(most // len(tokens), 1))
    if session.states is not None and session.keeps_beginnings and not session.target.backend.pass_tokens:
        chunk = min(chunk, EVERY)  # longer passes are not faster there
    for begin in range(0, longest, chunk):
        if begin:
            yield
        parts = [each[begin : begin + chunk] for each in tokens]
        ending = [row for row, part in enumerate(parts) if part and begin + len(part) == len(tokens[row])]
        last = sorted({len(parts[row]) - 1 for row in ending}) or [0]  # a model computes at least one position
        verdict = session.verify(Tree.chain(parts), only=last)
        session.keep([range(len(part)) for part in parts])
        for row in ending:
            found = verdict.logits[row, last.index(len(parts[row]) - 1)]
            logits[row] = found.clone() if chunk < longest else found  # flat passes reuse the memory
        if verdict.features is not None:
            part = verdict.features if fuse is None else fuse(verdict.features)
            if begin == 0:  # all at once: joining parts would need twice the memory
                features = part.new_empty(len(tokens), longest, part.shape[2])
            features[:, begin : begin + chunk] = part
        del verdict
    for row, count in enumerate(session.count_given()):
        if count:
            session.commit_given(row)
    return torch.stack(logits), features if session.layers else None


def choose_chunk(target: StockModel, rows: int, longest: int) -> int:
    """The tokens of each row in a forward pass of a prefill, after which `longest` tokens are committed.

    On a CPU, longer passes are not faster. A GPU needs them long; its memory for a mask limits them, which is repeated
    for the heads of a group.
    """
    largest = target.backend.pass_tokens
    if target.sees_texts_whole and target.facts.sees_all:
        return max(CHUNK, largest // rows)
    heads = getattr(target.config, "num_attention_heads", 0)  # 0: no layer attends
    repeats = heads // (getattr(target.config, "num_key_value_heads", None) or max(heads, 1)) or 1
    return max(CHUNK, min(largest, MASK_BYTES // (longest * target.dtype.itemsize * repeats)) // rows)


def group_by_length(lengths: Sequence[int], alike: int) -> list[list[int]]:
    """The indices of texts of these lengths; lengths in a group differ by less than `alike`."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or len(groups[-1]) == GROUP or lengths[row] - lengths[groups[-1][0]] >= alike:
            groups.append([])
        groups[-1].append(row)
    return groups


def find_unique(texts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """The texts without repetitions, and for each text its index among these."""
    unique: dict[tuple[int, ...], int] = {}
    sources = [unique.setdefault(tuple(text), len(unique)) for text in texts]
    return [*map(list, unique)], sources


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

    def count_bytes(self, slots: int | None = None) -> int:
        """The bytes of its session, if that has no other text. slots: as if it had no more of them, of one row."""
        states = self.session.cache.states
        own = states if slots is None else [each[:, :1, :, :slots] for each in states]
        return self.session.count_state_bytes(self.row) + sum(each.nbytes for each in (*own, *self.features))


class Prefixes:
    """Texts that have ended, at most so many bytes of them, for one target or several that share a model.

    Those that were not used for longest go first.
    """

    def __init__(self, most: int) -> None:
        self.most, self._version = most, 0
        self._texts: OrderedDict[tuple[StockModel, tuple[int, ...]], Text] = OrderedDict()

    @property
    def bytes(self) -> int:
        return sum(text.count_bytes() for text in self._texts.values())

    def add(self, text: Text, version: int) -> None:
        """Keep a copy of a text, as far as its row can go back. Others that it begins with are dropped.

        version: of the weights that computed it. Nothing is kept if another target has seen that they have changed.
        """
        if version != self._version:
            return
        length = text.session.find_beginning(text.row, len(text.tokens))
        text = text if length == len(text.tokens) else text.first(length)
        slots = -(-text.session.cache.lengths[text.row] // GROWTH) * GROWTH  # as a copy has
        if len(text.tokens) < SHORTEST or text.count_bytes(slots) > self.most:
            return
        target = text.session.target
        for owner, tokens in [*self._texts]:
            if owner is target and text.tokens[: len(tokens)] == tokens:
                del self._texts[owner, tokens]
        try:
            self._texts[target, text.tokens] = text.copy()
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            self.clear()
        while self.bytes > self.most:
            self._texts.popitem(last=False)

    def follow(self, version: int) -> None:
        """Drop all texts if the model's weights are of another version."""
        if version != self._version:
            self.clear()
        self._version = version

    def clear(self) -> None:
        """Drop all texts."""
        self._texts.clear()

    def find(self, target: StockModel, prompt: Sequence[int], running: Iterable[Text]) -> Text | None:
        """The longest beginning of a prompt, but for its last token, that any text has; None if it is too short.

        running: further texts of this target.
        """
        kept = (text for (owner, _), text in self._texts.items() if owner is target)
        known = [(count_common(text.tokens, prompt[:-1]), text) for text in (*running, *kept)]
        found = [(text.session.find_beginning(text.row, length), text) for length, text in known]
        length, text = max(found, key=lambda pair: pair[0], default=(0, None))
        if text is None or length < SHORTEST:
            return None
        if (target, text.tokens) in self._texts:
            self._texts.move_to_end((target, text.tokens))
        return text.first(length)


def lacks_memory(error: Exception) -> bool:
    """Whether memory is missing, by torch's messages."""
    told = ("allocate memory", "enough memory", "out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(each in str(error) for each in told)


def count_common(text: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common before they differ."""
    size = min(len(text), len(other))
    return next((place for place in range(size) if text[place] != other[place]), size)
