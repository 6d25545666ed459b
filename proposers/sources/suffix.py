"""The tokens that followed earlier occurrences of the text's last tokens, in the prompt and the answer so far.

After Oliaro et al., "SuffixDecoding" (2024), and Hu et al., "SAM Decoding" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

from decode import Step
from proposers.sources.source import Continuation, Source
from proposers.sources.suffix_automaton import SuffixAutomaton

SHORTER = 3  # contexts that a node's continuations are looked up in, longest first
BRANCHES = 4  # continuations of a context
LATEST = 64  # continuations that are compared: those that are newest
LENGTHS = (1, 2, 3, 4, 6, 9, 16)  # matches are counted alike between these lengths


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

    def continuations(self, state: Match) -> Iterator[Continuation]:
        automaton, context, length = state
        named = set[int]()
        for _ in range(SHORTER):
            if context == 0:
                return
            following, count, latest = automaton.next[context], automaton.count, automaton.latest
            newest = islice(reversed(following.items()), LATEST)
            best = nlargest(BRANCHES, newest, key=lambda pair: (count[pair[1]], latest[pair[1]]))
            size = bucket(length)
            for rank, (token, after) in enumerate(best):
                if token not in named:
                    named.add(token)
                    kind = size, rank, min(count[after], 3), min(len(following), 3)
                    yield Continuation(token, estimate(*kind), kind)
            context = automaton.link[context]
            length = automaton.length[context]


def bucket(length: int) -> int:
    """The index of the range of lengths that counts as one."""
    return next((index for index, limit in enumerate(LENGTHS) if length <= limit), len(LENGTHS))


def estimate(size: int, rank: int, count: int, distinct: int) -> float:
    return 0.5 / (rank + 1)
