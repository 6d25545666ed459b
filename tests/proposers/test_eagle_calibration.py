"""Calibrating EAGLE heads: trials along a text, and trees from a calibration."""

from __future__ import annotations

import pytest
import torch

from decode import Target
from proposers.calibration import Calibration
from scripts.calibration import measure_head
from scripts.calibration.measure_head import calibrate, try_head
from tests.proposers.test_eagle_proposers import MAIN, Written, make, record, target

__all__ = ["target"]  # a fixture

PROMPT, ANSWER = [5, 6, 7, 8], [9, 10, 11, 12, 13, 14]
DEPTH, RANKS = 3, 4


@pytest.mark.parametrize("kind", [*MAIN, "eagle of few tokens"])
@pytest.mark.parametrize("together", [2, 64])
@torch.no_grad()
def test_heads_are_tried_along_the_text(
    target: Target, monkeypatch: pytest.MonkeyPatch, kind: str, together: int
) -> None:
    """Each position and level alone, from the true features before it and the true tokens after it."""
    monkeypatch.setattr(measure_head, "CHUNK", together)
    monkeypatch.setattr(measure_head, "RANKS", RANKS)
    proposer = make(kind, target, depth=DEPTH)
    trials = try_head(target, proposer, PROMPT, ANSWER)
    assert trials.log_q.shape == (5, DEPTH, RANKS)
    text = PROMPT + ANSWER
    for position in range(5):
        root = len(PROMPT) + position
        written = Written(target, proposer.head, text[: root + 1])
        for level in range(DEPTH):
            known = root + 1 + level < len(text)
            assert bool(trials.known[position, level]) == known
            if not known:
                continue
            best = written.probabilities(text[root + 1 : root + 1 + level]).topk(RANKS)
            assert torch.allclose(trials.log_q[position, level].double(), best.values, atol=1e-5)
            right = proposer.head.tokens(best.indices) == text[root + 1 + level]
            assert torch.equal(trials.right[position, level], right)


def test_trees_deeper_than_a_calibration(target: Target) -> None:
    """Levels that were not measured are calibrated like the deepest that was."""
    calibration = calibrate(try_head(target, make("eagle", target, depth=2), PROMPT, ANSWER))
    assert len(calibration.acceptance) == 2
    longer = Calibration(
        (*calibration.acceptance, calibration.acceptance[1]),
        (*calibration.confidence, calibration.confidence[1]),
        (*calibration.positions, 0),
    )
    trees = [
        record(make("eagle", target, depth=3, nodes=12, calibration=given), target).drafted
        for given in (calibration, longer)
    ]
    assert trees[0] == trees[1] and max(len(path) for paths in trees[0].values() for path in paths) == 3


def test_a_calibrated_tree(target: Target) -> None:
    calibration = Calibration(((0.5, 0.2), (0.4, 0.1)), ((0.0, 1.0, 0.0),) * 2, (9, 9))
    drafted = record(make("eagle3", target, tree="calibrated", nodes=4, calibration=calibration), target).drafted
    assert {tuple(map(len, paths)) for paths in drafted.values() if len(paths) == 3} == {(1, 1, 2)}
