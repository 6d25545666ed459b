"""The demo, on tiny models."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from decode import PlainProposer, Target
from heads import save_head
from proposers import DraftProposer, MedusaProposer, NGramProposer
from scripts import demo, options
from tests.drafting import make_head


@pytest.fixture(scope="module")
def target(save_model: Callable[..., Path]) -> Target:
    return Target.load(str(save_model()), dtype="float64", accelerate="off")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 5)
    monkeypatch.setattr(demo, "PROMPTS", ("ab ab ab", "one two"))
    monkeypatch.setattr(options, "DRAFT_LAYERS", 1)


def choose(target: Target) -> dict:
    return demo.choose_proposers(target, argparse.Namespace(**dict.fromkeys(demo.OPTIONS)))


def test_the_best_head_is_compared_with_what_needs_none(
    monkeypatch: pytest.MonkeyPatch, target: Target, tmp_path: Path
) -> None:
    monkeypatch.setattr(options, "PRETRAINED", tmp_path)
    proposers = choose(target)
    assert list(map(type, proposers.values())) == [
        PlainProposer,
        DraftProposer,
        NGramProposer,
    ]  # the best is shown last
    save_head(make_head("medusa", target, output="own"), tmp_path / "medusa")
    proposers = choose(target)
    assert list(proposers) == ["none", "ngram", "draft", "medusa"]
    assert isinstance(proposers["medusa"], MedusaProposer)


def test_the_table_has_a_line_a_method(monkeypatch: pytest.MonkeyPatch, target: Target, tmp_path: Path) -> None:
    monkeypatch.setattr(options, "PRETRAINED", tmp_path)
    save_head(make_head("medusa", target, output="own"), tmp_path / "medusa")
    table = demo.compare(target, target.model, choose(target)).splitlines()
    rows = [line.split() for line in table[1 : table.index("")]]
    assert [(row[0], row[-1]) for row in rows] == [(name, "yes") for name in ("hf", "none", "ngram", "draft", "medusa")]
    assert [float(row[1]) for row in rows[:2]] == [1.0, 1.0] and min(float(row[1]) for row in rows) >= 1.0


def test_another_text_is_not_called_the_same(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    monkeypatch.setattr(demo, "run_stock", lambda model, prompts: ([[1], [2]], 1.0))
    rows = demo.compare(target, target.model, {"none": PlainProposer()}).splitlines()[1:3]
    assert [row.split()[-1] for row in rows] == ["yes", "no"]
