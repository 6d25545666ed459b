"""Compiled passes over a single token change a model's speed and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import decode.compiled
from decode import Target, generate
from decode.compiled import OneOrMany, SumOfProducts, compile_layers
from decode.packed import PackedLinear
from decode.prepare import prepare
from proposers import NGramProposer
from tests.models import needs_compiler, tiny

PROMPTS = [[5, 6, 7, 5, 6, 7, 8, 9, 10, 11, 12], [3, 4]]


@needs_compiler
@pytest.mark.parametrize("bias", [False, True])
def test_a_compiled_layer_computes_what_the_dense_one_does(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(70, 100, bias=bias).requires_grad_(False)
    layer = OneOrMany(SumOfProducts(linear), PackedLinear(linear))
    for shape in ((1,), (1, 1), (3,), (2, 5)):
        inputs = torch.randn(*shape, 70)
        assert torch.allclose(layer(inputs), linear(inputs), atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox", "mixtral"])
def test_a_compiled_model_says_the_same(kind: str) -> None:
    model = tiny(kind, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain, compiled = Target(model), Target(model, compile=True)
    assert torch.equal(plain.output_matrix, compiled.output_matrix)
    for proposer in (None, NGramProposer(length=4)):
        for prompts in (PROMPTS, PROMPTS[:1]):
            answers = [generate(target, prompts, proposer, max_new_tokens=20) for target in (plain, compiled)]
            assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(isinstance(module, OneOrMany) for module in model.modules())


@needs_compiler
def test_bfloat16_is_summed_up_as_exactly_as_by_the_dense_layer() -> None:
    torch.manual_seed(0)
    linear, inputs = nn.Linear(512, 64, dtype=torch.bfloat16).requires_grad_(False), torch.randn(1, 1, 512).bfloat16()
    exact = linear.double()(inputs.double())
    linear = linear.bfloat16()
    errors = [
        (layer(inputs).double() - exact).abs().max() for layer in (linear, OneOrMany(SumOfProducts(linear), linear))
    ]
    assert errors[1] <= 1.5 * errors[0]


@needs_compiler
def test_an_mlp_is_compiled_as_one_and_shares_its_tensors() -> None:
    model = tiny("llama", dtype=torch.float32)
    weight = model.model.layers[0].mlp.down_proj.weight
    prepare(model, compile=True)
    layer = model.model.layers[0]
    assert isinstance(layer.mlp, OneOrMany) and isinstance(layer.mlp.many.down_proj, PackedLinear)
    assert layer.mlp.one.down_proj.weight.data_ptr() == weight.data_ptr()
    assert isinstance(layer.self_attn.o_proj, OneOrMany) and isinstance(model.lm_head, OneOrMany)


def test_more_than_one_token_goes_to_the_packed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def record(layer: nn.Module, inputs: Tensor) -> Tensor:
        asked.append(inputs.numel() // inputs.shape[-1])
        return layer(inputs)

    monkeypatch.setattr(decode.compiled, "run_compiled", record)
    target = Target(tiny("llama", dtype=torch.float32), compile=True)
    asked.clear()
    generate(target, PROMPTS[:1], max_new_tokens=4)
    assert asked and set(asked) == {1}
    asked.clear()
    generate(target, PROMPTS, max_new_tokens=4)
    assert not asked


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nothing to compile"):
        Target(tiny("llama"), compile=True)  # in float64
    with pytest.raises(ValueError, match="packed already"):
        Target(prepare(tiny("llama", dtype=torch.float32)), compile=True)

    def fail(*_: object) -> None:
        raise RuntimeError("no compiler found\nand a long story")

    monkeypatch.setattr(decode.compiled, "run_compiled", fail)
    with pytest.raises(ValueError, match=r"\(RuntimeError: no compiler found\); it needs a C\+\+ compiler"):
        compile_layers(tiny("llama", dtype=torch.float32))
    monkeypatch.setattr(decode.compiled, "run_compiled", lambda layer, inputs: layer(inputs) * 1.01)
    with pytest.raises(ValueError, match=r"is off by 1\.0e-02 of its largest number"):
        compile_layers(tiny("llama", dtype=torch.float32))
