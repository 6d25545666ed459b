"""Lookahead's pool of n-grams as a source: what followed the last token, in the text and in the target's predictions.

After Fu et al. (2024), see `proposers.lookahead`. There is no window: the nodes of the merged tree take its place. Each
verified node's path and the target's prediction after it are an n-gram, of rejected nodes too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import NamedTuple

from decode import Step
from proposers.lookahead import Pool
from proposers.sources.source import Named, Source, sigmoid

SIZE = 4  # tokens of an n-gram
CONTINUATIONS = 3  # kept for each first token
# A continuation's log-odds of being right: by the number of equal tokens before it, plus by its rank.
LENGTH_WEIGHT = 0.0, -1.0, 0.0, 0.8
RANK_WEIGHT = 0.0, -0.7, -1.1


class Grams(NamedTuple):
    """A node's n-grams: the pool, and the rests of those that go on, the longest match first."""

    pool: Pool
    rests: tuple[tuple[int, int, tuple[int, ...]], ...]  # equal tokens, rank, and the tokens to come


class LookaheadSource(Source):
    """Continues each node by the n-grams that begin with its last tokens."""

    def observe(self, step: Step) -> None:
        if step.is_prefill:
            self._pools = {request_id: Pool(CONTINUATIONS) for request_id in step.request_ids}
            for request_id, text in zip(step.request_ids, step.sequences, strict=True):
                for end in range(SIZE, len(text)):
                    self._pools[request_id].add(text[end - SIZE : end])
        predicted = step.logits.argmax(dim=-1).tolist()
        trees = zip(step.tree.tokens.tolist(), step.tree.parents.tolist(), predicted, step.path, strict=True)
        self._roots: dict[int, Grams] = {}
        for request_id, text, tree in zip(step.request_ids, step.sequences, trees, strict=True):
            pool = self._pools[request_id]
            *tree_of_row, path = tree
            _read_tree(pool, text[-SIZE - len(path) : -len(path) - 1], *tree_of_row)
            pool.add(text[-SIZE:])  # the newest
            self._roots[request_id] = Grams(pool, _begin(pool, text[-1]))

    def start(self, request_id: int) -> Grams:
        return self._roots[request_id]

    def follow(self, state: Grams, token: int) -> Grams:
        going_on = [
            (length + 1, rank, rest[1:]) for length, rank, rest in state.rests if rest[0] == token and len(rest) > 1
        ]
        return Grams(state.pool, (*going_on, *_begin(state.pool, token)))

    def continuations(self, state: Grams) -> list[Named]:
        return [(rest[0], *_estimate(length, rank)) for length, rank, rest in state.rests]


@cache
def _estimate(length: int, rank: int) -> tuple[float, Hashable]:
    """The probability of a continuation, and its kind."""
    return sigmoid(LENGTH_WEIGHT[length] + RANK_WEIGHT[rank]), (length, rank)


def _begin(pool: Pool, token: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """The continuations of a token."""
    return tuple((1, rank, tuple(rest)) for rank, rest in enumerate(pool.find(token)))


def _read_tree(
    pool: Pool, text: Sequence[int], tokens: Sequence[int], parents: Sequence[int], predicted: Sequence[int]
) -> None:
    """Put the n-grams that end with a prediction into the pool. text: the tokens before the tree's root."""
    tails: list[tuple[int, ...]] = []
    for token, parent, after in zip(tokens, parents, predicted, strict=True):
        if tails and parent < 0:
            return  # the rest is padding
        tails.append((*(tails[parent] if tails else text[1 - SIZE :]), token)[1 - SIZE :])
        if len(tails[-1]) == SIZE - 1:
            pool.add((*tails[-1], after))
