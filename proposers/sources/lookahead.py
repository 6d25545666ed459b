"""N-grams that the target predicts itself: each pass continues assumed tokens, which the text may come to later.

After Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (2024), section 3. A window
holds assumed tokens for the next positions, in W columns of N - 1 tokens; column i begins i + 1 tokens after the root.
In the draft tree the columns' first tokens are a chain after the root, and the rest of a column is a branch below its
first token. So each node has the position and the ancestors that it has in the paper. A pass predicts one more token
after every column, a step of parallel Jacobi iteration. The column and this token are an n-gram, which goes into the
pool; the column goes on without its first token.

What differs from the paper: the window is full from the beginning, with pieces of the text instead of single tokens. It
moves on by as many tokens as the text does, so that columns keep their positions. The pool has the text's n-grams too.
Its n-grams continue draft tokens as well as the root, most likely first. Tokens of the window may be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from random import Random
from typing import NamedTuple

import torch

from decode import Step
from decode.devices.transfer import copy_packed, read
from proposers.sources.source import Named, Source

POOLED = 1 << 13  # first tokens in a request's pool, some 6 MB with the default sizes; the oldest go first


class LookaheadSource(Source):
    """Continues each node by n-grams that begin with its last tokens, from the text and from a window.

    window: columns of assumed tokens (W in the paper), and n-grams that are kept for each first token (G).
    size: tokens of an n-gram (N).

    The window takes W x (N - 1) nodes of every tree, but no more than half of it. On targets with a recurrent state,
    which verify chains, there is no window. Raises ValueError for less than one column or two tokens.
    """

    def __init__(self, window: int = 3, size: int = 4) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; it has at least one column")
        if size < 2:
            raise ValueError(f"size is {size}; an n-gram to draft from has at least two tokens")
        self.window, self.size, self.assumed = window, size, window * (size - 1)
        self._requests: dict[int, tuple[Pool, Window]] = {}

    def observe(self, step: Step) -> None:
        super().observe(step)
        before, self._requests = self._requests, {}
        for request_id, place in zip(step.request_ids, step.kept, strict=True):
            new = Pool(self.window, self.size), Window(self.window, self.size - 1, request_id)
            self._requests[request_id] = new if place is None else before[request_id]
        if not step.target.is_recurrent:
            self._advance(step)
        for request_id, text in self._texts.items():
            pool, window = self._requests[request_id]
            pool.read(text)
            if not step.target.is_recurrent:
                window.fill(text)

    def _advance(self, step: Step) -> None:
        """Continue the windows by what the target predicted after their columns."""
        tokens, parents = read(torch.stack([step.tree.tokens, step.tree.parents])).tolist()
        requests = [self._requests[request_id] for request_id in step.request_ids]
        ends = [window.find_ends(*tree) for (_, window), *tree in zip(requests, tokens, parents, strict=True)]
        places = torch.tensor([[row, node] for row, nodes in enumerate(ends) for node in nodes], dtype=torch.long)
        places = copy_packed({"places": places.view(-1, 2)}, step.logits.device)["places"]
        logits = step.logits[places[:, 0], places[:, 1], : step.target.vocabulary]  # those of other nodes stay unread
        predicted = iter(read(logits.argmax(dim=-1)).tolist())
        for (pool, window), nodes, path in zip(requests, ends, step.path, strict=True):
            for gram in window.advance([*islice(predicted, len(nodes))], len(path)):
                pool.add(gram)

    def assume(self, request_id: int) -> list[list[int]]:
        return self._requests[request_id][1].list_paths()

    def start(self, request_id: int) -> Grams:
        pool, _ = self._requests[request_id]
        return Grams(pool, pool.find(self._texts[request_id][-1]))

    def follow(self, state: Grams, token: int) -> Grams:
        going_on = [(matched + 1, rank, rest[1:]) for matched, rank, rest in state.rests if rest[:1] == (token,)]
        return Grams(state.pool, [*going_on, *state.pool.find(token)])

    def continuations(self, state: Grams) -> list[Named]:
        """Before anything is learned, the newest n-gram counts as right in half of all cases."""
        return [(rest[0], 0.5 / (1 + rank), (matched, rank)) for matched, rank, rest in state.rests if rest]


class Grams(NamedTuple):
    """The pool, and a node's n-grams: tokens up to the node, rank in the pool, and the tokens to come."""

    pool: Pool
    rests: list[tuple[int, int, tuple[int, ...]]]


class Pool:
    """A request's n-grams by their first token, the newest first."""

    def __init__(self, continuations: int, size: int) -> None:
        self.continuations, self.size = continuations, size
        self._read = 0  # tokens of the text
        self._grams: dict[int, list[tuple[int, ...]]] = {}  # without the first token, which is the key

    def read(self, text: Sequence[int]) -> None:
        """Add the new n-grams of the text."""
        for end in range(max(self._read + 1, self.size), len(text) + 1):
            self.add(text[end - self.size : end])
        self._read = len(text)

    def add(self, gram: Sequence[int]) -> None:
        first, rest = gram[0], tuple(gram[1:])
        others = [other for other in self._grams.pop(first, ()) if other != rest]
        self._grams[first] = [rest, *others[: self.continuations - 1]]  # the newest key is the last one
        if len(self._grams) > POOLED:
            del self._grams[next(iter(self._grams))]

    def find(self, first: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """The n-grams that begin with a token, as in `Grams`."""
        return [(1, rank, rest) for rank, rest in enumerate(self._grams.get(first, ()))]


class Window:
    """A request's columns of assumed tokens."""

    def __init__(self, width: int, levels: int, request_id: int) -> None:
        self.width, self.levels = width, levels
        self.columns: list[list[int]] = []
        self._random = Random(request_id)  # the same places in any batch

    def fill(self, text: Sequence[int]) -> None:
        """Add the columns that are missing at the end, from random places of the text."""
        while len(self.columns) < self.width:
            begin = self._random.randrange(len(text))
            self.columns.append([text[(begin + level) % len(text)] for level in range(self.levels)])

    def list_paths(self) -> list[list[int]]:
        """The path from the root to each column's end, root excluded."""
        firsts = [column[0] for column in self.columns]
        return [[*firsts[:index], *column] for index, column in enumerate(self.columns)]

    def find_ends(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The node in a verified tree that ends each column, up to the first column that is not there."""
        nodes = {place: node for node, place in enumerate(zip(parents, tokens, strict=True))}
        ends = []
        for path in self.list_paths():
            end: int | None = 0
            for token in path:
                end = end if end is None else nodes.get((end, token))
            if end is None:
                break
            ends.append(end)
        return ends

    def advance(self, predicted: Sequence[int], passed: int) -> list[list[int]]:
        """Continue the first columns by a predicted token each; the others are lost. Returns the n-grams.

        passed: tokens that the root has moved on.
        """
        grams = [[*column, token] for column, token in zip(self.columns, predicted, strict=False)]
        self.columns = [gram[1:] for gram in grams[passed - 1 :]]  # without its first token each begins one later
        return grams
