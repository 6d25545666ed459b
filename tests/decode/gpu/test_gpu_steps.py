"""On a simulated GPU: a step waits once and copies once; texts and errors are the CPU's, with graphs as well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

# At most so many waits, copies to the device, and launches in a step: of our own, as it is and with fused kernels, and
# all with graphs, the target's included.
BUDGETS = {
    "plain": (1, 1, 25, 11, 7),
    "eagle3": (1, 1, 380, 150, 26),
    "eagle3 adaptive": (2, 1, 400, 158, 27),
    "ngram sampling": (1, 1, 70, 54, 8),
    "eagle3 sampling": (1, 1, 640, 220, 27),
}


def run(module: str, *options: str) -> Any:
    """What a program with a simulated GPU prints. It changes torch, so it runs in a process of its own."""
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, int]]:
    return run("docs.measure.count_gpu_steps", "--json")


@pytest.mark.parametrize("method", BUDGETS)
def test_a_step_stays_within_its_budget(counts: dict[str, dict[str, int]], method: str) -> None:
    found, (waits, copies, launches, fused, graphs) = counts[method], BUDGETS[method]
    assert (found["waits"], found["copies"], found["pageable"]) == (waits, copies, 0)
    assert found["repeated"] == 0  # grouped queries share their keys and values
    assert launches * 0.8 < found["launches"] <= launches  # lower the budget where launches are saved
    assert fused * 0.8 < found["fused"] <= fused
    assert graphs * 0.8 < found["graphs"] <= graphs


def test_the_counter_counts() -> None:
    """The target's launches are those of its layers: 4 of them."""
    assert run("docs.measure.count_gpu_steps", "plain", "--json")["plain"]["target"] > 100


@pytest.mark.parametrize("options", [[], ["--graphs"]])
def test_texts_and_errors_are_the_cpus(options: list[str]) -> None:
    assert run("tests.support.simulated_texts", *options) == []
