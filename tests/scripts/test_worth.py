"""The verdict on drafting: how often and what is timed, and its words."""

from __future__ import annotations

import time

import pytest

from decode import Step, Target, Tree
from proposers import NGramProposer
from scripts.shared.worth import LEAST_GAIN, NEW_TOKENS, TIMED, Worth, describe_tau, time_drafts
from tests.support.models import tiny


class SlowProposer(NGramProposer):
    """Drafts as n-grams do, and takes its time."""

    def propose(self, step: Step, budget: int) -> Tree:
        time.sleep(0.01)
        return super().propose(step, budget)


def test_slow_drafts_are_not_worth_it_and_all_that_was_timed_is_counted() -> None:
    target = Target(tiny("llama"), deterministic=True)
    prompts = [[5, 6, 5, 6, 5], [8, 9], [1, 2, 3], [7], [4, 4]]
    worth = time_drafts(target, SlowProposer(), prompts)
    assert (worth.prompts, worth.tokens) == (TIMED, TIMED * NEW_TOKENS) and worth.tau >= 1
    assert worth.speed < 0.5 and worth.describe().startswith("worth it here: no, 0.")
    assert time_drafts(target, SlowProposer(), prompts[:1]).prompts == 1


@pytest.mark.parametrize(("speed", "verdict"), [(1.37, "yes"), (LEAST_GAIN, "yes"), (1.01, "no"), (0.91, "no")])
def test_the_verdict_has_its_speed_its_trees_and_what_was_timed(speed: float, verdict: str) -> None:
    assert Worth(speed, 1.254, 1190, 1).describe() == (
        f"worth it here: {verdict}, {speed:.2f} of the speed without drafts in trees sized by their cost, tau 1.25 "
        "(timed: 1,190 tokens of 1 prompt)"
    )


def test_tau_has_the_size_of_its_trees() -> None:
    assert describe_tau(1.234, "9 tokens of 2 prompts") == "tau 1.23 in trees of 16 nodes (9 tokens of 2 prompts)"
