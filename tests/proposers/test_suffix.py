"""The suffix automaton against a naive search."""

from __future__ import annotations

import random
from collections.abc import Sequence

from proposers.sources import SuffixAutomaton

TEXTS = 2_000


def occurrences(text: Sequence[int], part: Sequence[int]) -> list[int]:
    return [end for end in range(len(part), len(text) + 1) if list(text[end - len(part) : end]) == list(part)]


def longest_earlier_suffix(text: Sequence[int]) -> int:
    sizes = range(len(text) - 1, 0, -1)
    return next((size for size in sizes if len(occurrences(text, text[len(text) - size :])) > 1), 0)


def build(text: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend(token)
    return automaton


def test_random_texts() -> None:
    """Match, continuations, counts and latest places of random texts are those of a naive search."""
    choose = random.Random(0)
    for _ in range(TEXTS):
        text = [choose.randrange(choose.choice((2, 3, 5))) for _ in range(choose.randrange(1, 24))]
        automaton = build(text)
        state, size = automaton.match, longest_earlier_suffix(text)
        assert automaton.length[state] == size
        assert len(automaton.next) <= 2 * len(text) + 1
        if size:
            part = text[-size:]
            places = occurrences(text, part)
            assert automaton.count[state] == len(places)
            assert automaton.latest[state] == places[-1]
            expected = {text[place] for place in places if place < len(text)}
            assert set(automaton.next[state]) == expected
            for token, after in automaton.next[state].items():
                assert automaton.count[after] == len(occurrences(text, [*part, token]))
                assert automaton.latest[after] == occurrences(text, [*part, token])[-1]


def test_following_keeps_the_longest_match() -> None:
    choose = random.Random(1)
    for _ in range(500):
        text = [choose.randrange(3) for _ in range(choose.randrange(1, 30))]
        automaton = build(text)
        state, length, path = automaton.match, automaton.length[automaton.match], list(text)
        for _ in range(6):
            path.append(choose.randrange(4))
            state, length = automaton.follow(state, length, path[-1])
            sizes = range(len(path), 0, -1)
            expected = next((size for size in sizes if occurrences(text, path[len(path) - size :])), 0)
            assert length == expected
            if length:
                assert automaton.latest[state] == occurrences(text, path[len(path) - length :])[-1]


def test_loops_are_followed() -> None:
    """Only so many suffixes are counted, so that a repetition, whose every suffix recurs, takes no quadratic time."""
    automaton = build([1, 2, 3] * 2000)
    assert automaton.length[automaton.match] == 6000 - 3
    assert len(automaton.next) <= 2 * 6000
    assert automaton.count[automaton.follow(0, 0, 1)[0]] < 2000
