"""torch's global generator: greedy decoding and loading leave it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from decode import Engine, Sampling, Target, generate, speculate
from heads import KINDS
from heads.checkpoint import load_head, save_head
from tests.decode.test_lossless import DETERMINISTIC
from tests.support.drafting import make_head


def count_moves(call: Any) -> bool:
    before = torch.get_rng_state()
    call()
    return not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_greedy_decoding_leaves_it_alone(target: Target, name: str) -> None:
    proposer = DETERMINISTIC[name](target)
    assert not count_moves(lambda: generate(target, [[5, 9, 5], [7]], proposer, max_new_tokens=5))


def test_so_do_requests_and_transformers_generate(target: Target) -> None:
    engine, ids = Engine(target, "merged"), torch.tensor([[5, 9, 5]])
    assert not count_moves(lambda: [engine.add([5, 9, 5], max_new_tokens=5), *engine])
    options = {"max_new_tokens": 5, "do_sample": False, "custom_generate": speculate}
    assert not count_moves(lambda: target.model.generate(ids, **options, proposer="merged"))


@pytest.mark.parametrize("kind", KINDS)
def test_so_does_a_head_that_is_loaded(target: Target, kind: str, tmp_path: Path) -> None:
    """Else the first sampled answer of a process would differ from the same one later."""
    save_head(make_head(kind, target), tmp_path / kind)
    assert not count_moves(lambda: load_head(tmp_path / kind))


def test_sampling_without_a_seed_draws_one(target: Target) -> None:
    assert not count_moves(Sampling) and not count_moves(lambda: Sampling(0.7, seed=3))
    assert count_moves(lambda: Sampling(0.7))
    torch.manual_seed(4)
    first = generate(target, [5, 9, 5], None, sampling=Sampling(1.0))[0].tokens
    torch.manual_seed(4)
    generate(target, [5, 9, 5], None)
    assert generate(target, [5, 9, 5], None, sampling=Sampling(1.0))[0].tokens == first
