"""Deterministic targets: tree sizes depend on no clock, and all ranks of a group draft the first rank's trees."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import decode.stats
from decode import Target, generate
from decode.models import timed_model
from decode.models.cost_curve import CostCurve
from proposers import head_proposer, merged
from tests.support.drafting import Recorder
from tests.support.models import tiny
from tests.support.two_ranks import PROMPTS, PROPOSERS

ROOT = Path(__file__).parents[2]


def run_clock(seed: int) -> Callable[[], float]:
    """A clock that goes forward by a random time at each look."""
    generator, now = Random(seed), [0.0]

    def look() -> float:
        now[0] += 10 ** generator.uniform(-6, 0)
        return now[0]

    return look


def draft_by_clock(monkeypatch: pytest.MonkeyPatch, name: str, seed: int, deterministic: bool | CostCurve) -> list[Any]:
    """The sizes of all trees in two answers, if times are random."""
    clock = run_clock(seed)
    for module in (decode.stats, head_proposer, merged):
        monkeypatch.setattr(module, "perf_counter", clock)
    target = Target(tiny("llama", dtype=torch.float32), deterministic=deterministic)
    recorder = Recorder(PROPOSERS[name](target))
    generate(target, PROMPTS, recorder, max_new_tokens=40, stop_ids=[])
    return [tree.sizes.tolist() for tree in recorder.trees]


@pytest.mark.parametrize("deterministic", [True, CostCurve((1, 64), (1.0, 2.0))])
@pytest.mark.parametrize("name", PROPOSERS)
def test_trees_depend_on_no_clock(monkeypatch: pytest.MonkeyPatch, name: str, deterministic: bool | CostCurve) -> None:
    monkeypatch.setattr(timed_model, "measure_cost_curve", lambda *_: pytest.fail("something was measured"))
    first, second = (draft_by_clock(monkeypatch, name, seed, deterministic) for seed in (0, 1))
    assert first == second
    assert deterministic is True or max(map(max, first)) > 1  # something is drafted


def test_without_it_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_model, "load_curve", lambda *_: CostCurve((1, 64), (1.0, 2.0)))
    first, second = (draft_by_clock(monkeypatch, "eagle3", seed, False) for seed in (0, 1))
    assert first != second


def test_batches_cost_what_their_tokens_cost() -> None:
    target = Target(tiny("llama"), deterministic=CostCurve((1, 4, 8), (1.0, 1.0, 5.0)))
    assert [target.cost_curve(1)(nodes) for nodes in (1, 4, 8)] == [1.0, 1.0, 5.0]
    assert [target.cost_curve(4, 3000)(nodes) for nodes in (1, 2, 3)] == [1.0, 5.0, 9.0]
    assert target.cost_curve(4) is target.cost_curve(4, 5000)


@pytest.mark.slow
def test_two_ranks_draft_the_same_trees(tmp_path: Path) -> None:
    """Otherwise their collective operations fail."""
    command = [sys.executable, "-m", "tests.support.two_ranks"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meet")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], results
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in results)
    assert first == second
    assert all(max(map(max, sizes)) > 1 for sizes, _ in first.values())
