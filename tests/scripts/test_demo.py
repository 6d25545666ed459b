"""The demo, on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from heads import save_head
from proposers import load
from scripts import demo
from scripts.shared.options import ModelOptions, load_target
from tests.support.drafting import make_head


def test_the_table_has_a_line_for_each_method(
    monkeypatch: pytest.MonkeyPatch, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 5)
    monkeypatch.setattr(demo, "PROMPTS", ("ab ab ab", "one two"))
    monkeypatch.setattr(load, "PRETRAINED", tmp_path)
    model = ModelOptions(str(save_model()), dtype="float64", accelerate="off")
    target = load_target(model)
    save_head(make_head("medusa", target, output="own"), tmp_path / "medusa")
    head, _, *lines = demo.compare(target, model).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(row[0], row[-2]) for row in rows] == [(name, "100%") for name in ("none", *demo.METHODS.split(","))]
    assert [float(row[1]) for row in rows[:2]] == [1.0, 1.0] and min(float(row[1]) for row in rows) >= 1.0
    assert "identical" in head
