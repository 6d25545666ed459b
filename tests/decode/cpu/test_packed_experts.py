"""Packed experts change a mixture's speed and nothing else."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from decode import Sampling, Target, generate
from decode.cpu.native_ops import load_native_ops, pack
from decode.cpu.packed_experts import PackedExperts, PackedRouter, pack_experts
from decode.cpu.packed_linear import expecting_many_rows
from decode.prefill import read_texts
from decode.trees.tree import Tree
from decode.weights.blocks import Weight
from tests.support.gguf_files import random_blocks
from tests.support.models import needs_compiler, tiny

pytestmark = needs_compiler
FAMILIES = ["olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]  # the last one's are transposed, with biases
ROUTERS = "gate.weight", "router.weight"
PROMPTS = [[5, 6, 7, 5, 6, 7, 8, 9, 10, 11, 12], [3], [7, 8, 9] * 6]


@pytest.fixture(autouse=True)
def ops() -> None:
    """Whatever test is the first one of its process."""
    assert load_native_ops() is None


def experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


def draw_call(rows: int, inputs: int, experts: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """States, two experts of each row, not all of them, and their weights."""
    torch.manual_seed(0)
    chosen = torch.stack([torch.randperm(experts - 1)[:2] for _ in range(rows)])
    return torch.randn(rows, inputs), chosen, torch.rand(rows, 2)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_packed_experts_compute_what_the_module_does(name: str) -> None:
    model = tiny(name, dtype=torch.float32)
    stock = [module for module in model.modules() if hasattr(module, "down_proj") and hasattr(module, "has_gate")]
    packed = Target(model, accelerate="packed").model
    found = experts_of(packed)
    assert len(found) == len(stock) > 0
    assert sum(isinstance(module, PackedRouter) for module in packed.modules()) == len(found)
    call = draw_call(9, 32)
    for module, experts in zip(stock, found, strict=True):
        expected, together = module(*call), experts(*call)
        assert float((together - expected).abs().max()) < 1e-5 * float(expected.abs().max())
        alone = [experts(*(part[row : row + 1] for part in call)) for row in range(9)]
        assert torch.equal(torch.cat(alone), together)
        assert experts(*(part[:0] for part in call)).shape == (0, 32)
        with expecting_many_rows():  # more than 256 for each expert
            many = experts(*(part.repeat(150, 1) for part in call))
        torch.testing.assert_close(many[:9], expected, rtol=1e-4, atol=1e-5)
    ids = torch.arange(22).view(2, 11) + 5
    expected, logits = model(ids).logits, packed(ids).logits
    assert float((logits - expected).abs().max()) < 1e-4 * float(expected.std())


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_do_not_change_the_text(name: str) -> None:
    target = Target(tiny(name, dtype=torch.float32), accelerate="packed")
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=3)):
        plain = [answer.tokens for answer in generate(target, PROMPTS, None, max_new_tokens=20, sampling=sampling)]
        for proposer, size in (("ngram", 1), ("merged", 1), ("merged", 3)):
            answers = generate(target, PROMPTS, proposer, batch_size=size, max_new_tokens=20, sampling=sampling)
            assert [answer.tokens for answer in answers] == plain


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_experts_and_routers_are_packed_in_bfloat16(name: str) -> None:
    """Also with one expert for each row; and an output that differs by more than rounding is noticed."""
    for seed in range(4):
        packed = Target(tiny(name, dtype=torch.bfloat16, seed=seed), accelerate="packed").model
        assert not [module for module in packed.modules() if "gate_up_proj" in module._parameters]
        for experts in experts_of(packed):
            states, chosen, weights = draw_call(9, 32)
            states, weights = states.bfloat16(), weights.bfloat16()
            both, first = experts(states, chosen, weights), experts(states, chosen[:, :1], weights[:, :1])
            other = experts(states, chosen[:, 1:], weights[:, 1:])
            torch.testing.assert_close(first + other, both, rtol=0.05, atol=0.05 * float(both.abs().max()))


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "mixtral"])
@torch.inference_mode()
def test_logits_of_a_token_are_the_same_bits_in_any_pass(name: str) -> None:
    target = Target(tiny(name, dtype=torch.float32, hidden_size=256, head_dim=64), accelerate="packed")
    chain, sessions = [*range(20, 34)], [target.open(1), target.open(1)]
    for session in sessions:
        read_texts(session, PROMPTS[:1])
    together = sessions[0].verify(Tree.chain([chain])).logits[0]
    for node, token in enumerate(chain):
        assert torch.equal(sessions[1].verify(Tree.chain([[token]])).logits[0, 0], together[node])
        sessions[1].keep([[0]])


@pytest.mark.parametrize("form", [2, 12, 100, 30])
@pytest.mark.parametrize("digits", [0, 2, 3])
def test_the_op_takes_each_row_to_its_experts_weights(form: int, digits: int) -> None:
    """Bit for bit, in any form and fixed point; with two weights of each expert, and experts without rows."""
    outputs, inputs, counts = (70, 33), 256, (3, 0, 1, 30)
    weights = [
        Weight(random_blocks(form, size, inputs, seed)[0], form, inputs) for seed in range(4) for size in outputs
    ]
    states, bias = torch.randn(sum(counts), inputs), torch.randn(4 * sum(outputs))
    ends = torch.tensor(counts).cumsum(0)
    found = torch.ops.draftless.packed_linear(states, pack(*weights, digits=digits), bias, sum(outputs), ends)
    for expert, (rows, biases) in enumerate(zip(states.split(counts), bias.split(sum(outputs)), strict=True)):
        packed = pack(*weights[2 * expert : 2 * expert + 2], digits=digits)
        expected = torch.ops.draftless.packed_linear(rows, packed, biases, sum(outputs))
        assert torch.equal(found.split(counts)[expert], expected)
    for fault, message in (([5, 3, 7, 34], "must be sorted"), ([0, 0, 0, 33], "must have an expert")):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.draftless.packed_linear(states, pack(*weights), bias, sum(outputs), torch.tensor(fault))


@pytest.mark.parametrize("name", ["olmoe", "gpt_oss"])
@torch.no_grad()
def test_changed_weights_are_packed_again(name: str) -> None:
    model, ids = tiny(name, dtype=torch.float32), torch.arange(5, 25)[None]
    target = Target(model, accelerate="packed")
    experts = experts_of(target.model)[0]
    module: Any = model.model.layers[0].mlp.experts
    module.gate_up_proj.mul_(1.5)
    module.down_proj[1] += 0.25
    next(part for name, part in model.model.layers[1].mlp.named_parameters() if name in ROUTERS).mul_(-1)
    with pytest.raises(ValueError, match="weights have changed"):
        target.read_version()
    target.weights_changed()
    assert experts_of(target.model)[0] is experts  # in place
    expected, found = model(ids).logits, target.model(ids).logits
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.std())


def test_dense_weights_are_freed() -> None:
    model = tiny("olmoe", dtype=torch.float32)
    weights = [ref(module.down_proj) for module in model.modules() if hasattr(module, "has_gate")]
    target = Target(model, accelerate="packed", in_place=True)
    gc.collect()
    assert weights and all(weight() is None for weight in weights)
    assert not any(parameter.dim() == 3 for parameter in target.model.parameters())


def test_gradients_pass() -> None:
    gradients = []
    for is_packed in (False, True):
        model: Any = tiny("olmoe", dtype=torch.float32)
        module = model.model.layers[0].mlp.experts
        experts = PackedExperts(module) if is_packed else module
        states, chosen, weights = draw_call(9, 32)
        experts(states.requires_grad_(), chosen, weights).square().sum().backward()
        gradients.append(states.grad)
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5)


def test_other_experts_stay_as_they_are() -> None:
    """With another forward, in float64, or as the base of an adapter of peft. A weight that is NaN is named."""
    models = [tiny("olmoe", dtype=torch.float64 if case == 1 else torch.float32) for case in range(4)]
    modules: list[Any] = [model.model.layers[0].mlp for model in models]
    forward = modules[0].experts.forward
    modules[0].experts.forward = lambda *args: 2 * forward(*args)
    modules[2].experts.down_proj.data[3, 0, 0] = torch.nan
    modules[3].experts = nn.ModuleDict({"base_layer": modules[3].experts})
    for case, model in enumerate(models):
        with pytest.raises(ValueError, match=r"experts\.down_proj has values") if case == 2 else nullcontext():
            pack_experts(model)
    assert [len(experts_of(models[case])) for case in (0, 1, 3)] == [1, 0, 1]
