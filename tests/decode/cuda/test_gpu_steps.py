"""On a simulated GPU: a step waits once and copies once; texts and errors are the CPU's, with graphs as well."""

from __future__ import annotations

import pytest

from tests.support.commands import run_module

pytestmark = pytest.mark.slow

# At most so many waits, copies to the device, and launches in a step: of our own, and all with graphs, the target's
# included.
BUDGETS = {
    "plain": (1, 1, 25, 7),
    "eagle3": (1, 1, 380, 26),
    "eagle3 adaptive": (2, 1, 400, 27),
    "ngram sampling": (1, 1, 70, 8),
    "eagle3 sampling": (1, 1, 640, 27),
}


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, int]]:
    """Of a program that simulates a GPU, for which it changes torch."""
    return run_module("docs.measure.count_gpu_steps", "--json")


@pytest.mark.parametrize("method", BUDGETS)
def test_a_step_stays_within_its_budget(counts: dict[str, dict[str, int]], method: str) -> None:
    found, (waits, copies, launches, graphs) = counts[method], BUDGETS[method]
    assert (found["waits"], found["copies"], found["pageable"]) == (waits, copies, 0)
    assert found["repeated"] == 0  # grouped queries share their keys and values
    assert launches * 0.8 < found["launches"] <= launches  # lower the budget where launches are saved
    assert graphs * 0.8 < found["graphs"] <= graphs


def test_the_counter_counts(counts: dict[str, dict[str, int]]) -> None:
    """The target's launches are those of its layers: 4 of them."""
    assert counts["plain"]["target"] > 100


@pytest.mark.parametrize("options", [["--model", "llama"], ["--model", "gemma3_text"], ["--graphs"]])
def test_texts_and_errors_are_the_cpus(options: list[str]) -> None:
    assert run_module("tests.support.simulated_texts", *options) == []
