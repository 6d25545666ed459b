"""The tokens that followed earlier occurrences of the text's last tokens, in the prompt and the answer so far.

After Oliaro et al., "SuffixDecoding" (2024), and Hu et al., "SAM Decoding" (2024).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable
from functools import cache
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from decode import Step
from proposers.sources.source import Named, Source, sigmoid
from proposers.sources.suffix_automaton import SuffixAutomaton

SHORTER = 3  # contexts that a node's continuations are looked up in, longest first
BRANCHES = 4  # continuations of a context
LATEST = 64  # continuations that are compared: those that are newest
LENGTHS = 1, 2, 3, 4, 6, 9, 16  # matches are counted alike up to each of these lengths
# A copied token's log-odds of being right, fitted as in `recycling`: by the length of the match and the number of
# different tokens after it (1, 2, more), plus by the token's rank, plus by its count (1, 2, more).
LENGTH_WEIGHT = (
    (-0.18, -1.43, -1.92),
    (0.90, -1.07, -1.35),
    (1.41, -0.72, -1.80),
    (1.54, -0.60, -1.36),
    (2.11, -0.14, -1.92),
    (2.12, -1.15, -0.91),
    (2.52, -0.69, -0.36),
    (3.99, -0.13, -0.13),
)
RANK_WEIGHT = 0.23, -0.15, -0.44, -0.79
COUNT_WEIGHT = -0.77, -0.44, 0.06
_by_count = itemgetter(1, 2)


class Match(NamedTuple):
    """The longest earlier occurrence of a node's last tokens: a state of a text's automaton, and their number."""

    automaton: SuffixAutomaton
    state: int
    length: int


class SuffixSource(Source):
    """Continues each node as the text continued where the node's last tokens occurred before."""

    def observe(self, step: Step) -> None:
        if step.is_prefill:
            self._automata = {request_id: SuffixAutomaton() for request_id in step.request_ids}
        for request_id, sequence in zip(step.request_ids, step.sequences, strict=True):
            automaton = self._automata[request_id]
            for token in islice(sequence, automaton.size, None):
                automaton.extend(token)

    def start(self, request_id: int) -> Match:
        automaton = self._automata[request_id]
        return Match(automaton, automaton.match, automaton.length[automaton.match])

    def follow(self, state: Match, token: int) -> Match:
        return Match(state.automaton, *state.automaton.follow(state.state, state.length, token))

    def continuations(self, state: Match) -> Iterable[Named]:
        automaton, context, length = state
        named: dict[int, Named] = {}
        for _ in range(SHORTER):
            if context == 0:
                break
            newest = islice(reversed(automaton.next[context].items()), LATEST)
            copies = [(token, automaton.count[after], automaton.latest[after]) for token, after in newest]
            for continuation in rank_copies(length, copies):
                named.setdefault(continuation[0], continuation)
            context = automaton.link[context]
            length = automaton.length[context]
        return named.values()


def rank_copies(length: int, copies: Iterable[tuple[int, int, int]]) -> list[Named]:
    """The tokens that followed earlier occurrences of the last `length` tokens, most frequent first.

    copies: each token, how often it followed, and the place of its latest occurrence. Of these, at most `BRANCHES` are
    named. Which are right most often depends on the length, the rank, the count and the number of different tokens.
    """
    found = sorted(copies, key=_by_count, reverse=True)
    size, distinct = bisect_left(LENGTHS, length), min(len(found), 3)
    return [
        (token, *_estimate(size, rank, min(count, 3), distinct))
        for rank, (token, count, _) in enumerate(found[:BRANCHES])
    ]


@cache
def _estimate(size: int, rank: int, count: int, distinct: int) -> tuple[float, Hashable]:
    """The probability of a copied token, and its kind."""
    log_odds = LENGTH_WEIGHT[size][distinct - 1] + RANK_WEIGHT[rank] + COUNT_WEIGHT[count - 1]
    return sigmoid(log_odds), (size, rank, count, distinct)
