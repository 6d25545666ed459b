"""The draft budget: how many nodes are drafted, and whether any are."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch

from decode import Target, generate, stream
from decode.devices.cost_curve import CostCurve
from proposers import MedusaProposer, MergedProposer, NGramProposer
from proposers.calibration import Calibration
from proposers.draft_budget import LEVEL_SECONDS, LEVEL_TIME, DraftBudget, DrafterWorth, chain_time
from proposers.head_proposer import KEYS_A_LEVEL
from tests.support.drafting import Recorder, fix_cost, make_head, texts
from tests.support.models import tiny


def begin(rise: float) -> DraftBudget:
    """A draft budget at the beginning of a text. Each further node costs `rise` of a one-node pass."""
    budget = DraftBudget()
    budget.begin(CostCurve([1, 64], [1.0, 1.0 + 63 * rise]))
    return budget


def test_budget_weighs_gains_against_costs() -> None:
    gains = [0.0, 0.6, 1.0, 1.2, 1.3]
    choices = [1 + begin(rise).choose_growth(gains, 1) for rise in (0, 0.15, 0.3, 0.7)]
    assert choices == [5, 4, 3, 1]


def test_trees_that_end_early_lose_nothing() -> None:
    """Where `is_worth_more` ends a tree, no larger one would have been chosen."""
    for seed in range(200):
        choose = random.Random(seed)
        costs = [1.0]
        for _ in range(63):
            costs.append(costs[-1] + choose.choice([0, 0, 0.02, 0.3]) * choose.random())
        p = sorted((choose.random() ** 3 for _ in range(63)), reverse=True)
        whole, early = [DraftBudget() for _ in range(2)]
        for budget in (whole, early):
            budget.begin(CostCurve(range(1, 65), costs))
            budget.learn(0.0)
        size = next((size for size in range(1, 64) if not early.is_worth_more(size, p[size - 1])), 64)
        chosen = whole.choose_growth([*accumulate(p, initial=0.0)], 0)
        assert chosen < size and chosen == early.choose_growth([*accumulate(p[: size - 1], initial=0.0)], 0)


def test_budget_learns_what_drafting_costs() -> None:
    budget = DraftBudget()
    budget.begin(CostCurve([1, 64], [5.0, 5.0]))
    assert budget.level_time == LEVEL_TIME + LEVEL_SECONDS / budget.cost.seconds[0] and not budget.is_worth_a_level(
        [0.01]
    )
    for seconds in (2.0, 2.0, 40.0):  # other work on the machine
        budget.take_drafting_time(seconds, levels=4)
    assert budget.level_time == 0.1 and budget.is_worth_a_level([0.2]) and not budget.is_worth_a_level([0.05])
    budget.begin(CostCurve([1, 64], [10.0, 40.0]), new_texts=False)  # a pass over more rows takes twice as long
    assert budget.level_time == 0.05
    node = 3 / 63  # each path's next token is a node, too
    assert budget.is_worth_a_level([0.051 + node]) and not budget.is_worth_a_level([0.049 + node])
    assert budget.is_worth_a_level([0.03 + node, 0.03 + node]) and not budget.is_worth_a_level([0.04] * 9)
    assert budget.is_worth_a_level([0.051 + node] * 4, rows=4) and not budget.is_worth_a_level([0.051 + node] * 3, 4)


def speed(quality: float, truth: float, rise: float, draft: float, seed: int) -> float:
    """Tokens a unit of time over an answer of 128 tokens, where a draft token is accepted `truth` times as often
    as the head predicts; plain decoding has 1."""
    generator, budget = random.Random(seed), begin(rise)
    tokens = time = 0.0
    while tokens < 128:
        tokens, time = tokens + 1, time + 1
        if budget.is_backing_off():
            continue
        q = generator.betavariate(2 * quality, 2 - 2 * quality)
        budget.take_drafting_time(draft, 1)
        steps = [q ** (depth + 1) for depth in range(4)]  # a chain, node by node
        gains = [sum(steps[:count]) for count in range(5)]
        nodes = 1 + budget.choose_growth(gains, 1)
        accepted = 0
        while accepted < nodes - 1 and generator.random() < q * truth:
            accepted += 1
        budget.learn(accepted)
        tokens, time = tokens + accepted, time + rise * (nodes - 1) + draft
    return tokens / time


@pytest.mark.parametrize("rise", [0.01, 0.06, 0.15])
@pytest.mark.parametrize("draft", [0.05, 0.25])
def test_a_poor_head_costs_almost_nothing(rise: float, draft: float) -> None:
    """No text is decoded at less than 0.97 of plain speed on average, however wrong the head's probabilities are."""
    for quality, truth in ((0.5, 0.1), (0.15, 0.3), (0.9, 0.0), (0.3, 0.3)):
        speeds = [speed(quality, truth, rise, draft, seed) for seed in range(60)]
        assert 60 / sum(1 / one for one in speeds) > 0.97, (quality, truth)
    assert speed(0.7, 1.0, rise, draft, 0) > 1.2


@pytest.mark.parametrize(("cost", "drafts"), [(1.2, True), (1.6, False)])
def test_no_first_draft_where_the_calibration_promises_no_gain(
    monkeypatch: pytest.MonkeyPatch, target: Target, cost: float, drafts: bool
) -> None:
    """A draft token that is right half of the time is not worth a pass that costs 1.6 times as much."""
    fix_cost(monkeypatch, target, CostCurve([1, 2, 64], [1.0, cost, 64 * cost]))
    sure = (4.6, 0.0, 0.0)  # 0.99 for every token: once tried, a draft is worth it
    calibration = Calibration(((0.5, 0.1),) * 3, (sure,) * 3, (100,) * 3)
    recorder = Recorder(MedusaProposer(make_head("medusa", target), calibration=calibration))
    generate(target, [[5, 9, 5]] * 2, recorder, max_new_tokens=60, stop_ids=())
    assert (recorder.trees[0].width > 1) == drafts
    assert any(tree.width > 1 for tree in recorder.trees) == drafts


def test_drafting_resumes_with_a_smaller_batch(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    curves = [CostCurve([1, 64], [1.0, cost]) for cost in (1.0, 64.0)]
    monkeypatch.setattr(target, "cost_curve", lambda batch, _: curves[batch > 1])
    monkeypatch.setattr(target.costs, "fixed", True)  # a level of a tiny head takes as long as a pass
    calibration = Calibration(((0.5, 0.1),) * 3, ((0.0, 1.0, 0.0),) * 3, (100,) * 3)
    recorder = Recorder(MedusaProposer(make_head("medusa", target), calibration=calibration))

    def ends(row: int, tokens: list[int]) -> bool:
        return row == 1 and len(tokens) > 5

    generate(target, [[5, 9, 5], [7]], recorder, max_new_tokens=20, criterion=ends, stop_ids=())
    drafts = [tree.width > 1 for tree in recorder.trees]
    assert drafts[:6] == [tree.batch == 1 for tree in recorder.trees[:6]] and True in drafts[:6]


def test_drafting_is_tried_late() -> None:
    budget = DraftBudget(expected_tau=(1.0, 1.5))
    budget.begin(CostCurve([1, 64], [1.0, 64.0]))
    assert [budget.is_backing_off() for _ in range(66)] == [True] * 64 + [False] * 2
    budget.begin(CostCurve([1, 64], [1.0, 1.0]))
    assert not budget.is_backing_off()


def test_a_slow_reader_does_not_count_as_a_slow_target(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("decode.requests.answer.perf_counter", lambda: now[0])
    target = Target(tiny("llama"))
    target.model.register_forward_hook(lambda *_: now.__setitem__(0, now[0] + 1))
    seconds: list[float] = []
    monkeypatch.setattr(target, "learn_cost", lambda texts, nodes, taken: seconds.append(taken))
    for _ in stream(target, [[5, 9, 5, 9, 5]], NGramProposer(), max_new_tokens=8, stop_ids=[]):
        now[0] += 100
    assert len(seconds) > 2 and set(seconds) == {1.0}


@pytest.mark.parametrize("kind", ["ngram", "merged", "medusa"])
def test_rows_share_a_budget_where_padding_costs_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is sure of its draft gets more nodes than others. The text stays the same."""
    target = Target(tiny("llama", dtype=torch.float32), accelerate="packed")
    assert target.passes_flat
    rise = 0.02 if kind == "medusa" else 0.3  # a random head is sure of nothing
    fix_cost(monkeypatch, target, CostCurve([1, 2, 64], [1.0, 1 + rise, 1 + 63 * rise]))
    made = {"ngram": NGramProposer, "merged": MergedProposer, "medusa": lambda: MedusaProposer(make_head(kind, target))}
    prompts = [[5, 9, 6, 5, 9, 6, 5, 9, 6, 5, 9], [40, 41, 42, 43], [7, 8, 30, 7]]
    plain = texts(target, prompts, None, max_new_tokens=20, stop_ids=[])
    recorder = Recorder(made[kind]())
    assert texts(target, prompts, recorder, max_new_tokens=20, stop_ids=[]) == plain
    sizes = [tree.sizes.tolist() for tree in recorder.trees]
    assert any(len({*each}) > 1 for each in sizes) and max(map(max, sizes)) > 1


def test_a_chain_costs_what_its_rejection_gives_again() -> None:
    """With a recurrent state: the accepted tokens and the bonus token, and all that was given already."""

    def cost(nodes: float) -> float:
        return 1 + 0.1 * (nodes - 1)

    assert chain_time(cost, 0, 1, 0, 1) == 1
    assert chain_time(cost, 3, 1, 0, 1) == cost(4)  # the root alone is never rejected
    assert chain_time(cost, 0, 5, 4, 1) == cost(5)
    assert chain_time(cost, 0, 5, 2, 0.5) == pytest.approx(cost(5) + 0.5 * 0.3)
    assert chain_time(cost, 3, 5, 2, 0) == pytest.approx(cost(8) + 0.6)


def use_drafter(steps: int, level: float, adds: float, node: float = 0.2) -> list[int]:
    """The steps in which a drafter is used that adds so many tokens, each time in one level."""
    worth, used = DrafterWorth(), []
    for step in range(steps):
        if worth.is_worth_it(1.0, level, node, 0.0, room=100):
            worth.learn(1.0, adds, 1, level)
            used.append(step)
    return used


@pytest.mark.parametrize("level", [0.02, 0.25])
def test_a_drafter_that_adds_nothing_takes_under_one_percent(level: float) -> None:
    for steps in (60, 1000):
        assert 0 < len(use_drafter(steps, level, adds=0.0)) * level < 0.01 * steps
    pauses = [after - before for before, after in pairwise(use_drafter(1000, level, adds=0.0)) if after - before > 1]
    assert len(pauses) > 2 and pauses == sorted(pauses) and pauses[0] < pauses[-1]


def test_a_drafter_is_used_where_the_others_know_little() -> None:
    assert len(use_drafter(100, 0.25, adds=0.4)) == 100
    worth = DrafterWorth()
    for _ in range(20):
        worth.learn(0.8, 0.4, 1, 0.25)
    for unknown in (0.9, 0.6, 0.4, 0.1):
        assert worth.is_worth_it(unknown, 0.25, 0.2, 0.0, 100) == (unknown > 0.5)


def test_a_drafter_is_tried_late_where_a_node_costs_most_of_a_token() -> None:
    """As in batches, where verifying one more takes nearly as long as a step."""
    assert use_drafter(100, 0.25, adds=0.4, node=0.2)[0] == 0
    assert use_drafter(100, 0.25, adds=0.0, node=0.6)[0] == 25
    assert use_drafter(300, 0.25, adds=0.5, node=0.6)[-100:] == [*range(200, 300)], "it pays nevertheless"


def test_a_calibration_counts_for_eight_drafts() -> None:
    """A bad one ends them after as many as bring nothing; without a calibration they end at once."""

    def count_drafts(budget: DraftBudget) -> int:
        budget.begin(CostCurve([1, 2], [1.0, 1.2]))
        for drafts in range(1, 50):
            budget.choose_growth([0.0, 0.5], 1)
            budget.learn(0.0)
            if budget.is_backing_off():
                return drafts
        return 50

    promising, modest, unknown = (
        count_drafts(DraftBudget(*given))
        for given in (((1.0, 1.5), 0.1), ((1.0, 1.25), 0.1), ((1.0, float("inf")), 0.1))
    )
    assert modest == 1  # which promises no gain
    assert modest < unknown < promising < 9


@pytest.mark.parametrize(("tokens", "room", "is_tried"), [(2000, 64, True), (32000, 64, False), (32000, 2000, True)])
def test_a_long_prompt_is_read_for_a_long_answer_alone(tokens: int, room: int, is_tried: bool) -> None:
    """Before anything is measured, by a pass of 32 milliseconds."""
    budget = DraftBudget()
    budget.begin(CostCurve((1, 2, 8), (0.032, 0.038, 0.06)))
    level, node = budget.rate * budget.level_time, budget.node_cost
    assert DrafterWorth().is_worth_it(1.0, level, node, tokens / KEYS_A_LEVEL, room) == is_tried
