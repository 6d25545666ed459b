"""Compiled passes over a single token change a model's speed and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def fresh_kernels() -> Iterator[None]:
    """No kernels of other tests; and an error instead of uncompiled layers where there are too many."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


@needs_compiler
@pytest.mark.parametrize(("size", "bias"), [(70, False), (70, True), (5000, True)])
def test_a_compiled_layer_computes_what_the_dense_one_does(size: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(size, 100, bias=bias).requires_grad_(False)
    layer = OneOrMany(SumOfProducts(linear), PackedLinear(linear))
    for shape in ((), (1,), (1, 1), (3,), (2, 5)):
        inputs = torch.randn(*shape, size)
        assert torch.allclose(layer(inputs), linear(inputs), atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox", "qwen2_moe"])
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


@needs_compiler
def test_layers_of_many_shapes_are_all_compiled() -> None:
    model = nn.Sequential(*[nn.Linear(8 + number, 9 + number) for number in range(12)])
    with torch.inference_mode():
        inputs = torch.randn(1, 8)
        expected = model(inputs)
        compile_layers(model)
        assert torch.allclose(model(inputs), expected, atol=1e-5)


@needs_compiler
def test_an_mlp_with_a_hook_or_another_forward_keeps_it() -> None:
    model = tiny("llama", dtype=torch.float32)
    first, second = (layer.mlp for layer in model.model.layers)
    seen: list[str] = []
    original = first.forward
    first.forward = lambda inputs: seen.append("forward") or original(inputs)
    second.register_forward_hook(lambda *_: seen.append("hook"))
    prepare(model, compile=True)
    seen.clear()
    generate(Target(model), PROMPTS[:1], max_new_tokens=3)
    assert seen[-4:] == ["forward", "hook"] * 2


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
