"""The tokens that followed earlier occurrences of the text's last tokens, in the prompt and the answer so far.

After Oliaro et al., "SuffixDecoding" (2024), and Hu et al., "SAM Decoding" (2024).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from decode import Step
from proposers.sources.source import Named, Source, sigmoid

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
KINDS = {  # the probability of a copied token by its kind: `LENGTHS` of the match, rank, count, different tokens
    (size, rank, count, distinct): sigmoid(by_distinct + by_rank + by_count)
    for size, by_size in enumerate(LENGTH_WEIGHT)
    for distinct, by_distinct in enumerate(by_size, start=1)
    for rank, by_rank in enumerate(RANK_WEIGHT)
    for count, by_count in enumerate(COUNT_WEIGHT, start=1)
}
COUNTED = 32  # links: a new occurrence is counted for so many suffixes, longest first, so that loops stay fast
_by_count = itemgetter(1, 2)


class Match(NamedTuple):
    """The longest earlier occurrence of a node's last tokens: a state of a text's automaton, and their number."""

    automaton: SuffixAutomaton
    state: int
    length: int


class SuffixSource(Source):
    """Continues each node as the text continued where the node's last tokens occurred before."""

    def __init__(self) -> None:
        self._automata: dict[int, SuffixAutomaton] = {}  # by request id

    def observe(self, step: Step) -> None:
        before, self._automata = self._automata, {}
        for request_id, place, sequence in zip(step.request_ids, step.kept, step.sequences, strict=True):
            automaton = SuffixAutomaton() if place is None else before[request_id]
            self._automata[request_id] = automaton
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
    kinds = [(size, rank, min(count, 3), distinct) for rank, (_, count, _) in enumerate(found[:BRANCHES])]
    return [(token, KINDS[kind], kind) for kind, (token, _, _) in zip(kinds, found, strict=False)]


class SuffixAutomaton:
    """Finds all earlier occurrences of a growing text's last tokens at once. Append tokens with `extend`.

    A state stands for the substrings that end at the same places; its link leads to the longest suffix of them that
    ends elsewhere too (Blumer et al. 1985). State 0 is the empty string.
    Lists with an entry per state: `next` by token, `link`, `length` of the longest substring, `count` of occurrences,
    and `latest`, the place after the last one. There are at most two states per token.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.count, self.latest = [-1], [0], [0], [0]
        self.size = 0  # tokens read
        self._last = 0  # the state of the whole text

    @property
    def match(self) -> int:
        """The state of the longest suffix of the text that occurred before; 0 if its last token is new."""
        return max(self.link[self._last], 0)

    def extend(self, token: int) -> None:
        """Append a token."""
        self.size += 1
        state, new = self._last, self._add({}, -1, self.length[self._last] + 1, 0)
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._split(state, token)
        else:
            self.link[new] = 0
        self._last = new
        for _ in range(COUNTED):
            self.count[new] += 1
            self.latest[new] = self.size
            new = self.link[new]
            if new <= 0:
                break

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """After a match of `length` tokens in `state`: the state and length of the longest match that ends in `token`.

        (0, 0) if the token has not occurred.
        """
        while token not in self.next[state]:
            if state == 0:
                return 0, 0
            state = self.link[state]
            length = self.length[state]
        return self.next[state][token], length + 1

    def _split(self, state: int, token: int) -> int:
        """The state after `state` and `token` that holds no longer substring; cut off from a larger one if needed."""
        large = self.next[state][token]
        if self.length[large] == self.length[state] + 1:
            return large
        small = self._add(dict(self.next[large]), self.link[large], self.length[state] + 1, self.count[large])
        self.latest[small] = self.latest[large]
        self.link[large] = small
        while state >= 0 and self.next[state].get(token) == large:
            self.next[state][token] = small
            state = self.link[state]
        return small

    def _add(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        self.latest.append(0)
        return len(self.next) - 1
