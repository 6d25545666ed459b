"""Refused by name: wrong roots, logits that are no numbers, a proposer in two streams, row-coupled models"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Chunk, Sampling, Step, Target, Tree, generate, stream
from decode.models.self_test import TOLERANCE
from proposers import DraftProposer, NGramProposer
from tests.models import tiny

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9, 10]]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama"))


class WrongRoot:
    """Drafts after the token before the last."""

    layers: Sequence[int] = ()

    def propose(self, step: Step, budget: int) -> Tree:
        return Tree.chain([[sequence[-2], 3, 4] for sequence in step.sequences])


def test_a_tree_with_another_root_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="must be its row's bonus token"):
        generate(target, PROMPTS, WrongRoot())


def spoil_logits(target: Target, monkeypatch: pytest.MonkeyPatch, step: int, value: float) -> None:
    """Put a value among the last row's logits in one forward pass."""
    forward, calls = target.model.forward, [0]

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if calls[0] == step:
            output.logits[-1, 0, 17] = value
        calls[0] += 1
        return output

    monkeypatch.setattr(target.model, "forward", spoilt)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20}])
@pytest.mark.parametrize("draft", ["none", "ngram", "sampled", "lossy"])
def test_logits_that_are_no_numbers_stop_the_run(
    target: Target, monkeypatch: pytest.MonkeyPatch, draft: str, settings: dict[str, float], value: float
) -> None:
    proposers = {
        "ngram": NGramProposer(length=4),
        "sampled": DraftProposer(Target(tiny("llama")), sampled=True, length=4),
    }
    spoil_logits(target, monkeypatch, step=5, value=value)
    sampling = Sampling(seed=2, **settings)
    with pytest.raises(FloatingPointError, match="request 1: the model's logits"):
        generate(
            target,
            PROMPTS,
            proposers.get(draft),
            sampling=sampling,
            stop_ids=[],
            max_new_tokens=120,
            lossy_typical_acceptance=draft == "lossy",
        )


def test_a_forbidden_token_is_no_fault(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_logits(target, monkeypatch, step=5, value=-float("inf"))
    for temperature in (0.0, 0.8):
        answers = generate(target, PROMPTS, sampling=Sampling(temperature=temperature), max_new_tokens=12, stop_ids=[])
        assert [len(answer.tokens) for answer in answers] == [12, 12]


def test_a_proposer_in_two_streams_is_refused(target: Target) -> None:
    shared = NGramProposer(length=3)

    def begin(proposer: NGramProposer) -> Iterator[Chunk]:
        return stream(target, PROMPTS[:1], proposer, max_new_tokens=24, stop_ids=[])

    first, second = begin(shared), begin(shared)
    next(first)
    next(second)
    with pytest.raises(RuntimeError, match="this NGramProposer is used by two streams at once"):
        list(first)
    alone = [chunk.tokens for chunk in begin(NGramProposer(length=3))]
    assert [chunk.tokens for chunk in second] == alone[1:]
    assert [chunk.tokens for chunk in begin(shared)] == alone  # it is free again
    stopped = begin(shared)
    next(stopped)
    stopped.close()
    assert [chunk.tokens for chunk in begin(shared)] == alone


def couple_rows(module: torch.nn.Linear, args: Any, output: Tensor) -> Tensor:
    """As if activations were quantised with one scale for the whole tensor."""
    scale = args[0].abs().max() / 15
    return torch.nn.functional.linear((args[0] / scale).round() * scale, module.weight)


def test_row_coupled_quantisation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(couple_rows)
    # Also where it would be within the tolerance of half precision.
    monkeypatch.setitem(TOLERANCE, torch.bfloat16, 1.5)
    with pytest.raises(ValueError, match="llama is row-coupled"):
        Target(model)
