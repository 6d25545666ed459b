"""The demo, on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from decode import PlainProposer, Target
from heads import save_head
from proposers import load, load_proposer
from scripts import demo
from scripts.benchmark.methods import Measured
from tests.support.drafting import make_head


@pytest.fixture(scope="module")
def target(save_model: Callable[..., Path]) -> Target:
    return Target.load(str(save_model()), dtype="float64", accelerate="off")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 5)
    monkeypatch.setattr(demo, "PROMPTS", ("ab ab ab", "one two"))


def test_the_table_has_a_line_for_each_method(monkeypatch: pytest.MonkeyPatch, target: Target, tmp_path: Path) -> None:
    monkeypatch.setattr(load, "PRETRAINED", tmp_path)
    save_head(make_head("medusa", target, output="own"), tmp_path / "medusa")
    proposers = {name: load_proposer(name, target) for name in demo.METHODS}
    table = demo.compare(target, target.model, proposers).splitlines()
    rows = [line.split() for line in table[1:]]
    assert [(row[0], row[-1]) for row in rows] == [(name, "yes") for name in ("hf", *demo.METHODS)]
    assert [float(row[1]) for row in rows[:2]] == [1.0, 1.0] and min(float(row[1]) for row in rows) >= 1.0


def test_different_texts_are_not_called_the_same(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    monkeypatch.setattr(demo, "ask_peer", lambda *inputs: Measured([[1]], [[1]], 1.0))
    rows = demo.compare(target, target.model, {"none": PlainProposer()}).splitlines()[1:3]
    assert [row.split()[-1] for row in rows] == ["yes", "no"]
