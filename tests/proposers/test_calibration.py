"""Calibration: what is measured of a head, the tau that follows from it, and its file."""

from __future__ import annotations

import json
import math
import random
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch

from decode import Target
from draftless_commands import calibrate
from draftless_commands.calibrate import Trials, fit_calibration, fit_logistic, try_head
from proposers.calibration import FILE, Calibration, load_calibration
from tests.proposers.test_head_proposers import MAIN, Written, make, record, target

__all__ = ["target"]  # a fixture
PROMPT, ANSWER = [5, 6, 7, 8], [9, 10, 11, 12, 13, 14]
PLAIN = (0.0, 1.0, 0.0)
TABLE = ((0.5, 0.2, 0.05), (0.4, 0.1, 0.1), (0.3, 0.05, 0.15))
GOOD = Calibration(TABLE, ((0.1, 0.9, 0.2),) * 3, (100, 70, 40))


@pytest.mark.parametrize("seed", range(5))
def test_the_expected_tau_is_that_of_the_most_likely_paths(seed: int) -> None:
    choose = random.Random(seed)
    table = tuple(tuple(choose.random() for _ in range(4)) for _ in range(3))
    calibration = Calibration(table, (PLAIN,) * 3, (1,) * 3)
    products = [math.prod(path) for length in range(4) for path in product(*table[:length])]
    expected = [*accumulate(sorted(products, reverse=True))]
    for nodes in (1, 2, 7, 30, 85, 1000):
        assert calibration.expect_tau(nodes) == pytest.approx(expected[:nodes])


def made_up_trials(count: int) -> Trials:
    """Draft tokens with probabilities 0.6, 0.25 and 0.1, that are right as often as in `TABLE`."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(count, 3, generator=generator)
    right = torch.zeros(count, 3, 3, dtype=torch.bool)
    for level, row in enumerate(TABLE):
        rank = torch.bucketize(draws[:, level].contiguous(), torch.tensor(row).cumsum(dim=0))
        right[:, level] = torch.nn.functional.one_hot(rank, 4)[:, :3].bool()
    known = torch.ones(count, 3, dtype=torch.bool)
    known[: count // 10, 2] = False
    return Trials(torch.tensor([0.6, 0.25, 0.1]).log().expand(count, 3, 3), right, known)


def test_known_accuracies_are_found() -> None:
    calibration = fit_calibration(made_up_trials(200_000))
    for row, expected in zip(calibration.acceptance, TABLE, strict=True):
        assert row == pytest.approx(expected, abs=0.005)
    reached = [200_000, 200_000 * 0.75, 200_000 * 0.75 * 0.6 * 0.9]
    assert list(calibration.positions) == pytest.approx(reached, rel=0.02)


def test_confidence_is_how_often_a_draft_token_is_right() -> None:
    """Even where the head is overconfident and depends on the path's probability, as Medusa is."""
    generator = torch.Generator().manual_seed(0)
    sure = -3 * torch.rand(100_000, 1, generator=generator, dtype=torch.float64)
    before = -2 * torch.rand(100_000, 1, generator=generator, dtype=torch.float64)
    truth = Calibration(((1.0,),), ((-0.7, 0.6, 0.5),), (1,)).log_probabilities(0, sure, before)
    right = torch.rand(sure.shape, generator=generator, dtype=torch.float64) < truth.exp()
    odds = sure - torch.log1p(-sure.exp())
    weights = fit_logistic(torch.cat([torch.ones_like(odds), odds, before], dim=1), right[:, 0])
    assert weights.tolist() == pytest.approx([-0.7, 0.6, 0.5], abs=0.05)


def test_few_trials_do_not_give_certainty() -> None:
    trials = made_up_trials(6)
    trials.right[:] = False
    calibration = fit_calibration(trials)
    assert all(abs(weight) < 20 for row in calibration.confidence for weight in row)
    assert calibration.positions == (6, 0, 0) and calibration.confidence[1] == PLAIN


def test_an_uncalibrated_head_keeps_its_probabilities() -> None:
    sure = torch.tensor([[[-0.5, -2.0, -1e-9, 0.0, -40.0]]])
    calibration = Calibration(((1.0,),), (PLAIN,), (1,))
    calibrated = calibration.log_probabilities(0, sure, torch.full((1, 1, 1), -3.0))
    assert torch.allclose(calibrated, sure, atol=1e-5)
    assert bool((GOOD.log_probabilities(0, sure, torch.zeros(1, 1, 1)) <= 0).all())


@pytest.mark.parametrize("kind", [*MAIN, "eagle of few tokens"])
@pytest.mark.parametrize(("together", "ranks"), [(2, 4), (64, 10)])
@torch.no_grad()
def test_heads_are_tried_along_the_text(
    target: Target, monkeypatch: pytest.MonkeyPatch, kind: str, together: int, ranks: int
) -> None:
    """Each position and level alone, from the true features before it and the true tokens after it."""
    monkeypatch.setattr(calibrate, "CHUNK", together)
    monkeypatch.setattr(calibrate, "RANKS", ranks)
    proposer = make(kind, target, depth=3)
    trials, text = try_head(target, proposer, PROMPT, ANSWER), PROMPT + ANSWER
    ranks = min(ranks, proposer.head.draft_size)
    assert trials.log_q.shape == (5, 3, ranks)
    for position in range(5):
        root = len(PROMPT) + position
        written = Written(target, proposer.head, text[: root + 1])
        for level in range(3):
            known = root + 1 + level < len(text)
            assert bool(trials.known[position, level]) == known
            if known:
                best = written.probabilities(text[root + 1 : root + 1 + level]).topk(ranks)
                assert torch.allclose(trials.log_q[position, level].double(), best.values, atol=1e-5)
                right = proposer.head.tokens(best.indices) == text[root + 1 + level]
                assert torch.equal(trials.right[position, level], right)


def test_a_calibration_is_saved_and_loaded(tmp_path: Path) -> None:
    assert load_calibration(tmp_path) is None
    GOOD.save(tmp_path)
    assert load_calibration(tmp_path) == GOOD
    content = json.loads((tmp_path / FILE).read_text())
    assert content["expected_tau"][:3] == [1.0, 1.5, 1.7]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    (tmp_path / FILE).write_text(json.dumps(content | {"best_tree": [[0], [1], [0, 0]]}))  # of an older version
    assert load_calibration(tmp_path) == GOOD


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value"),
        ("{}", "lacks 'acceptance'"),
        ({"acceptance": [[0.5], [0.5, 0.5], [0.1]]}, "the same number of ranks"),
        ({"acceptance": [[float("nan")], [0.5], [0.1]]}, "between 0 and 1"),
        ({"confidence": [[0, 1, float("inf")]] * 3}, "finite"),
        ({"confidence": [[0, 1, 0]] * 2}, r"as of confidence \(2\)"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    if isinstance(content, dict):
        GOOD.save(tmp_path)
        content = json.dumps(json.loads((tmp_path / FILE).read_text()) | content)
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_calibration(tmp_path)
    assert "calibration.json is no calibration" in str(caught.value) and "draftless calibrate" in str(caught.value)


def test_a_calibration_of_other_heads_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="of 3 heads, not of 2"):
        make("medusa", target, {"heads": 2}, calibration=GOOD)


def test_levels_that_were_not_measured_are_calibrated_like_the_deepest(target: Target) -> None:
    short = fit_calibration(try_head(target, make("eagle", target, depth=2), PROMPT, ANSWER))
    parts = short.acceptance, short.confidence, short.positions
    assert len(short.acceptance) == 2
    longer = Calibration(*((*part, part[1]) for part in parts))  # type: ignore[arg-type]
    trees = [
        record(make("eagle", target, depth=3, nodes=12, calibration=given), target).drafted for given in (short, longer)
    ]
    assert trees[0] == trees[1] and max(len(path) for paths in trees[0].values() for path in paths) == 3
