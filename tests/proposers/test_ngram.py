"""Drafts of n-grams: where they are copied from, and how long they are."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from decode import Target
from decode.devices.cost_curve import CostCurve
from proposers import DraftProposer, NGramProposer
from tests.support.drafting import first_step, fix_cost


def drafts(proposer: NGramProposer, target: Target, *sequences: list[int], budget: int = 64) -> list[list[int]]:
    tree = proposer.propose(first_step(target, *sequences), budget)
    return [row[1:size].tolist() for row, size in zip(tree.tokens, tree.sizes.tolist(), strict=True)]


@pytest.mark.parametrize(("size", "length"), [(2, 10), (3, 5), (1, 4)])
def test_prompt_lookup_of_transformers_is_reachable(target: Target, size: int, length: int) -> None:
    """On random texts of few tokens, prefix by prefix, the draft is the one that transformers makes."""
    theirs = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([2]), num_output_tokens=length, max_matching_ngram_size=size, max_length=1000
    )
    found = 0
    for seed in range(40):
        choose = random.Random(seed)
        text = [choose.randrange(2, 3 + seed % 8) for _ in range(40)]
        for end in range(2, 40):
            expected = theirs.get_candidates(torch.tensor([text[:end]]))[0][0, end:].tolist()
            assert drafts(NGramProposer(size, length, first=True), target, text[:end]) == [expected]
            found += bool(expected)
    assert found > 500


MATCHES, ROWS = [[1, 3, 50, 9, 1, 3, 51, 9, 3, 52, 9, 1, 3]], [[5, 6, 7, 8, 5], [1], [4, 4, 4]]


@pytest.mark.parametrize(
    ("settings", "rows", "budget", "expected"),
    [
        ({"length": 1}, MATCHES, 64, [[51]]),  # the longest match wins, then the latest
        ({"length": 1, "max_size": 1}, MATCHES, 64, [[52]]),
        ({"length": 1, "max_size": 2, "first": True}, MATCHES, 64, [[50]]),
        ({"length": 7}, [[9, 5, 6, 7, 5, 6, 7]], 64, [[5, 6, 7, 5, 6, 7, 5]]),  # a repetition goes on
        ({"length": 7}, [[5, 6, 2, 7, 8, 5]], 64, [[6]]),  # up to an end token
        ({"length": 3}, ROWS, 64, [[6, 7, 8], [], [4, 4, 4]]),
        ({"length": 3}, ROWS, 2, [[6], [], [4]]),
        ({"length": 3}, ROWS, 1, [[], [], []]),
    ],
)
def test_what_followed_the_last_tokens_is_drafted(
    target: Target, settings: dict[str, Any], rows: list[list[int]], budget: int, expected: list[list[int]]
) -> None:
    assert drafts(NGramProposer(**settings), target, *rows, budget=budget) == expected


def test_nothing_is_drafted_that_a_row_has_no_room_for(target: Target) -> None:
    step = first_step(target, [4, 4, 4], [5, 6, 5], [7, 7], room=[4, 2, 1])
    proposer = NGramProposer(length=9)
    assert proposer.propose(step, 64).sizes.tolist() == [4, 2, 1]
    drafter = DraftProposer(target, width=2, depth=9, nodes=19)
    assert drafter.propose(step, 64).sizes.tolist() == [11] * 3  # all rows share the passes of the draft model


def test_the_index_grows_with_the_text(target: Target) -> None:
    choose = random.Random(1)
    text = [choose.randrange(6) for _ in range(120)]
    growing = NGramProposer(length=5)
    growing.propose(first_step(target, text[:1]), 1)
    for end in range(2, 120):
        growing._texts[0].read(text[:end])
        assert growing._texts[0].draft(5, frozenset([2])) == drafts(NGramProposer(length=5), target, text[:end])[0]


def test_drafts_end_where_they_no_longer_pay(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    text = [5, 6, 7, 8, 9, 10, 5, 6, 7]
    lengths = []
    for steepness in (0.0, 0.2, 5.0):
        fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 1.0 + 63 * steepness]))
        lengths.append(len(drafts(NGramProposer(), target, text)[0]))
    assert lengths[0] > lengths[1] > lengths[2] == 0


def test_the_curve_of_the_longest_text_cuts_copied_drafts(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    curves = {5: CostCurve([1, 64], [1.0, 64.0]), 300: CostCurve([1, 64], [1.0, 1.0])}
    monkeypatch.setattr(target, "cost_curve", lambda batch, context: curves[context])
    assert drafts(NGramProposer(), target, [5, 5, 5, 5, 5]) == [[]]
    assert all(drafts(NGramProposer(), target, [5, 5, 5, 5, 5], [6] * 300))


def test_failures_shorten_and_successes_lengthen_drafts(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 1.0 + 63 * 0.2]))
    text = [5, 6, 7, 8, 9, 10, 5, 6, 7]
    lengths = []
    for accepted in (0, None):
        proposer, step = NGramProposer(), first_step(target, text)
        for _ in range(31):
            drafted = proposer.propose(step, 64).width - 1
            path = list(range(1 + (drafted if accepted is None else accepted)))
            step = replace(step, kept=[0], path=[path])
        lengths.append(1 + drafted)
    assert lengths[0] < lengths[1]
