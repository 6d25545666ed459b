"""Deterministic targets: tree sizes depend on no clock, and all ranks of a group draft the first rank's trees.

    python -m tests.decode.test_deterministic RANK FILE

decodes on one rank of a group of two on the CPU and prints the trees and texts of several proposers as JSON. FILE is
new; both ranks meet in it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from time import sleep
from typing import Any

import pytest
import torch
from torch import distributed

import decode.requests.answer
from decode import Proposer, Target, costs, generate, speculate
from decode.devices.cost_curve import CostCurve
from proposers import HEAD_PROPOSERS, DraftProposer, MergedProposer, NGramProposer, merged, tree_proposer
from tests.support.commands import run_module
from tests.support.drafting import Recorder, make_head
from tests.support.models import tiny

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9, 7, 8, 9, 7]]
# By rank. With the second one nothing would be drafted.
CURVES = CostCurve((1, 64), (1.0, 2.0)), CostCurve((1, 64), (1.0, 400.0))

PROPOSERS: dict[str, Callable[[Target], Proposer]] = {
    "ngram": lambda target: NGramProposer(),
    "merged": lambda target: MergedProposer(),
    "eagle3": lambda target: HEAD_PROPOSERS["eagle3"](make_head("eagle3", target)),
    "hydra": lambda target: HEAD_PROPOSERS["hydra"](make_head("hydra", target)),
    "merged eagle3": lambda target: MergedProposer(drafter=PROPOSERS["eagle3"](target)),
    "draft": lambda target: DraftProposer(Target(tiny("llama", num_hidden_layers=1, dtype=torch.float32))),
}


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
    for module in (decode.requests.answer, tree_proposer, merged):
        monkeypatch.setattr(module, "perf_counter", clock)
    target = Target(tiny("llama", dtype=torch.float32), deterministic=deterministic)
    recorder = Recorder(PROPOSERS[name](target))
    generate(target, PROMPTS, recorder, max_new_tokens=40, stop_ids=[])
    return [tree.sizes.tolist() for tree in recorder.trees]


@pytest.mark.parametrize("deterministic", [True, CURVES[0]])
@pytest.mark.parametrize("name", PROPOSERS)
def test_trees_depend_on_no_clock(monkeypatch: pytest.MonkeyPatch, name: str, deterministic: bool | CostCurve) -> None:
    monkeypatch.setattr(costs, "measure_cost_curve", lambda *_: pytest.fail("something was measured"))
    first, second = (draft_by_clock(monkeypatch, name, seed, deterministic) for seed in (0, 1))
    assert first == second
    assert deterministic is True or max(map(max, first)) > 1  # something is drafted


def test_without_it_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "load_curve", lambda *_: CURVES[0])
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
    run = partial(run_module, "tests.decode.test_deterministic")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, ["0", "1"], [str(tmp_path / "meet")] * 2)
    assert first == second
    assert all(max(map(max, sizes)) > 1 for sizes, _ in first.values())


def couple_ranks(rank: int) -> Callable[..., Any]:
    """A hook of the target that takes a random time and averages the ranks' logits, as with tensor parallelism.

    Ranks whose trees have different sizes fail.
    """
    clock = Random(rank)

    def couple(module: Any, args: Any, output: Any) -> None:
        sleep(clock.random() / 200)
        shapes: list[Any] = [None, None]
        distributed.all_gather_object(shapes, tuple(output.logits.shape))
        assert shapes[0] == shapes[1], f"the ranks verify trees of shapes {shapes}"
        distributed.all_reduce(output.logits)
        output.logits /= 2

    return couple


def decode_on_rank(rank: int) -> dict[str, Any]:
    """By proposer: the sizes of its trees, and the texts."""
    model = tiny("llama", dtype=torch.float32)
    target = Target(model, deterministic=CURVES[rank])
    model.register_forward_hook(couple_ranks(rank))
    found: dict[str, Any] = {}
    for name, make in PROPOSERS.items():
        recorder = Recorder(make(target))
        answers = generate(target, PROMPTS, recorder, max_new_tokens=24, stop_ids=[])
        found[name] = [tree.sizes.tolist() for tree in recorder.trees], [answer.tokens for answer in answers]
    settings: Any = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    recorder = Recorder(NGramProposer())
    settings |= {"custom_generate": speculate, "proposer": recorder, "deterministic": CURVES[rank]}
    tokens = model.generate(torch.tensor(PROMPTS[:1]), **settings)
    found["speculate"] = [tree.sizes.tolist() for tree in recorder.trees], tokens.tolist()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    meet = {"init_method": f"file://{sys.argv[2]}", "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", rank=int(sys.argv[1]), world_size=2, **meet)
    print(json.dumps(decode_on_rank(int(sys.argv[1]))))
    distributed.destroy_process_group()
