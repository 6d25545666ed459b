"""The verdict on drafting: what it is estimated from, and its words."""

from __future__ import annotations

import re
import time

import pytest

from decode import Stats, Step, Target, Tree
from decode.devices.cost_curve import CostCurve
from decode.requests.answer import Seconds
from draftless_commands.shared.worth import LEAST_GAIN, NEW_TOKENS, TRIED, Worth, estimate_speed, find_worth
from proposers import NGramProposer
from tests.support.models import tiny


class SlowProposer(NGramProposer):
    def propose(self, step: Step, budget: int) -> Tree:
        time.sleep(0.01)
        return super().propose(step, budget)


def test_slow_drafts_are_not_worth_it_and_prompts_do_not_count() -> None:
    target = Target(tiny("llama"), deterministic=True)
    prompts = [[5, 6, 5, 6, 5], [8, 9], [1, 2, 3], [7], [4, 4]]
    worth = find_worth(target, SlowProposer(), prompts)
    assert (worth.prompts, worth.tokens) == (TRIED, TRIED * (NEW_TOKENS - 1)) and worth.tau >= 1
    assert worth.speed < 0.9 and worth.describe().startswith("worth it here: no, 0.")
    assert find_worth(target, SlowProposer(), prompts[:1]).prompts == 1


def test_the_speed_is_that_of_acceptance_cost_and_drafting() -> None:
    cost = CostCurve((1, 3, 5), (1.0, 1.2, 1.8))
    stats = Stats(steps=20, tokens=36, nodes=40, seconds=Seconds(proposer=1.0, target=3.0, accept=1.0, rest=9.0))
    assert estimate_speed(stats, cost) == pytest.approx(1.8 / (1.2 * 1.25))
    assert estimate_speed(Stats(), cost) == 1


def test_the_verdict_has_its_speed_its_trees_and_its_basis() -> None:
    basis = r"\(estimated, not timed: 1,190 tokens of 1 prompt, trees sized by their cost, tau 1.25\)"
    for speed, verdict in ((1.37, "yes"), (LEAST_GAIN, "yes"), (1.01, "no"), (0.91, "no")):
        assert re.fullmatch(f".* {verdict}, {speed:.2f}x .*{basis}", Worth(speed, 1.254, 1190, 1).describe())
    assert "too few tokens to tell (49 tokens of 1 prompt)" in Worth(1.37, 1.254, 49, 1).describe()
