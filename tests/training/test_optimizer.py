"""Optimizers: which weights each gets, and how long their first steps are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon

from decode import Target
from tests.support.drafting import make_head
from tests.support.models import tiny
from training.optimizer import MUON_SCALE, make_optimizers


@pytest.mark.parametrize(
    ("kind", "settings", "vocabulary"),
    [
        ("medusa", {"output": "own"}, {"lm_heads"}),
        ("medusa", {"output": "target"}, set()),
        ("hydra", {"prefix": True, "output": "shared"}, {"lm_head"}),
        ("eagle", {}, set()),
        ("eagle3", {}, {"lm_head"}),
    ],
)
def test_muon_gets_the_matrices_between_hidden_states(kind: str, settings: dict, vocabulary: set[str]) -> None:
    head = make_head(kind, Target(tiny("llama")), **settings)
    weights = {f"head.{name}": weight for name, weight in head.named_parameters()}
    muon, adamw = make_optimizers(weights, 1e-2)
    assert isinstance(muon, Muon) and isinstance(adamw, AdamW)
    names = {id(weight): name for name, weight in weights.items()}
    moved = [{names[id(weight)] for group in each.param_groups for weight in group["params"]} for each in (muon, adamw)]
    assert moved[0] | moved[1] == {*weights} and not moved[0] & moved[1]
    linears = {f"head.{name}.weight" for name, module in head.named_modules() if isinstance(module, nn.Linear)}
    outputs = {name for name in linears if name.split(".")[1] in vocabulary}
    assert bool(outputs) == bool(vocabulary)
    assert moved[0] == linears - outputs
    assert [group["lr"] for group in muon.param_groups] == [1e-2 * MUON_SCALE]
    assert [group["lr"] for group in adamw.param_groups] == [1e-2]


def test_a_step_is_as_long_as_the_learning_rate() -> None:
    """With both optimizers: the root mean square over a matrix, in the first step."""
    torch.manual_seed(0)
    hidden, output = (nn.Parameter(torch.randn(96, 64)) for _ in range(2))
    for matrix in (hidden, output):
        matrix.grad = torch.randn(96, 64)
    before = [matrix.detach().clone() for matrix in (hidden, output)]
    for optimizer in make_optimizers({"head.fc": hidden, "head.lm_head": output}, 1e-3):
        optimizer.step()
    for matrix, old in zip((hidden, output), before, strict=True):
        assert 0.6e-3 < (matrix - old).square().mean().sqrt() < 1.1e-3


def test_an_optimizer_without_weights_is_left_out() -> None:
    (only,) = make_optimizers({"head.fc": nn.Parameter(torch.zeros(2, 2))}, 1.0)
    assert isinstance(only, Muon)
