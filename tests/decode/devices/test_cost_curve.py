"""How steps correct the cost curve."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from time import monotonic

import pytest
import torch

from decode import Target, costs, generate
from decode.costs import SIZES
from decode.devices.cost_curve import CostCurve, StepTimes
from proposers import NGramProposer
from tests.support.models import tiny

CURVE = CostCurve((1, 2, 4, 8, 16), (10.0, 11.2, 14.0, 22.6, 40.3))
LOOP = {1: 11.0, 2: 13.2, 4: 17.5, 8: 27.5, 16: 47.3}  # what steps of these sizes take


@pytest.mark.parametrize("rows", [1, 4])
def test_fifty_steps_teach_what_a_step_takes(rows: int) -> None:
    """To 5 %, though every fifth step is slowed down, and sizes differ in how often they are verified."""
    times, random = StepTimes(), Random(rows)
    for step in range(50):
        nodes = random.choice([1, 1, 1, 2, 2, 4, 4, 8])
        times.learn(CURVE, rows, nodes, LOOP[nodes] * random.uniform(1, 1.04) * (1 if step % 5 else 4))
    found = times.correct(CURVE, rows)
    assert [found.seconds[0] * found(nodes) for nodes in (1, 2, 4, 8)] == pytest.approx([*LOOP.values()][:4], rel=0.05)
    assert found(16) / found(8) == pytest.approx(CURVE(16) / CURVE(8))  # never seen: as wrong as the nearest size
    assert times.correct(CURVE, rows) is found and not times.contradicted


def test_two_threads_share_what_steps_taught() -> None:
    times, end = StepTimes(), monotonic() + 0.5

    def work(seed: int) -> None:
        while monotonic() < end:
            times.learn(CURVE, 1, seed, 20.0)
            times.correct(CURVE, 1)

    with ThreadPoolExecutor() as pool:
        assert [*pool.map(work, (1, 4, 8))] == [None] * 3


def test_what_was_long_ago_is_forgotten() -> None:
    times = StepTimes()
    for slow, count in ((3.0, 40), (1.0, 300)):
        for _ in range(count):
            times.learn(CURVE, 1, 2 if slow > 1 else 1, slow * LOOP[2 if slow > 1 else 1])
    assert times.correct(CURVE, 1).seconds[:2] == pytest.approx((11.0, 1.1 * 11.2))


@pytest.mark.parametrize("slowness", [1.0, 3.0])
def test_a_curve_of_a_busy_machine_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slowness: float
) -> None:
    monkeypatch.setattr(costs, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(costs, "measure_cost_curve", lambda *_: CostCurve(SIZES[:2], [slowness, slowness]))
    now = [0.0]
    monkeypatch.setattr("decode.requests.answer.perf_counter", lambda: now[0])
    target = Target(tiny("llama"))
    target.model.register_forward_hook(lambda *_: now.__setitem__(0, now[0] + 1))
    generate(target, [[5, 9, 5]], NGramProposer(), max_new_tokens=40, stop_ids=[])
    assert target.costs.steps.contradicted == (slowness > 1)
    assert target.cost_after([[5, 9, 5]]).seconds[0] == 1 and target.cost_curve().seconds[0] == slowness
    monkeypatch.setattr(costs, "measure_cost_curve", lambda *_: CostCurve(SIZES[:2], [1.0, 1.0]))
    assert target.cost_curve().seconds[0] == slowness  # nothing is measured within an answer
    target.warm_up()
    assert target.cost_curve().seconds[0] == 1 and not target.costs.steps.contradicted
    assert Target(tiny("llama")).cost_curve().seconds[0] == 1  # on disk too


def test_a_deterministic_target_learns_nothing() -> None:
    target = Target(tiny("llama", dtype=torch.float32), deterministic=True)
    for _ in range(100):
        target.learn_cost([[5, 9]], 1, 100.0)
    assert target.cost_after([[5, 9]]) is target.cost_curve()
