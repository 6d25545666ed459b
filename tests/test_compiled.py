"""Compiled passes over a few tokens change a model's speed and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import decode.compiled
import decode.kernels
import decode.packed
from decode import Target, generate
from decode.compiled import compile_model, whole_layers
from decode.kernels import FEW, FewOrMany
from decode.packed import PackedLinear, pack_layers
from decode.prepare import prepare
from decode.tree import Tree
from proposers import NGramProposer
from tests.models import needs_compiler, tiny

OUTPUT = ["sum_products"]  # of the output layer
WHOLE = ["_forward", "_forward", *OUTPUT]  # and of two decoder layers
PROMPTS = [[5, 6, 7, 5, 6, 7, 8, 9, 10, 11, 12], [3]]


@pytest.fixture(autouse=True)
def fresh_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernels of other tests; and an error instead of uncompiled layers where there are too many."""
    torch.compiler.reset()
    compile_up_to(2, monkeypatch)  # tokens: each number takes seconds
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def compile_up_to(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decode.compiled, decode.kernels):
        monkeypatch.setattr(module, "FEW", few)


def forwards(model: PreTrainedModel) -> list[Any]:
    return [layer.forward for layer in whole_layers(model)]


@needs_compiler
@pytest.mark.parametrize(("size", "bias"), [(70, False), (70, True), (5000, True)])
def test_a_compiled_linear_layer_computes_what_the_dense_one_does(size: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(size, 100, bias=bias).requires_grad_(False)
    layer = FewOrMany(linear)
    for shape in ((), (1,), (1, 1), (3,), (2, 2), (2, 5)):
        inputs = torch.randn(*shape, size)
        with torch.inference_mode():
            assert torch.allclose(layer(inputs), linear(inputs), atol=1e-5)
        assert torch.allclose(layer(inputs), linear(inputs), atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "few", "whole"), [("llama", FEW, 2), ("gpt2", 2, 2), ("gemma3_text", 2, 3), ("qwen2_moe", 2, 0)]
)
def test_a_compiled_model_says_the_same(kind: str, few: int, whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_up_to(few, monkeypatch)
    model = tiny(kind, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain, compiled = Target(model), Target(model, compile=True)
    assert len(forwards(compiled.model)) == whole
    assert torch.equal(plain.output_matrix, compiled.output_matrix)
    for proposer in (None, NGramProposer(length=few)):
        for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[1:]):
            answers = [generate(target, prompts, proposer, max_new_tokens=20) for target in (plain, compiled)]
            assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(all(layer.kernels.values()) for layer in forwards(compiled.model))
    assert not forwards(model) and not any(isinstance(module, FewOrMany) for module in model.modules())


@needs_compiler
def test_decoder_layers_are_compiled_whole_and_share_their_tensors() -> None:
    model = tiny("llama", dtype=torch.float32)
    weight = model.model.layers[1].mlp.down_proj.weight
    prepare(model, compile=True)
    first, second = forwards(model)
    assert (first.number, second.number) == (0, 1)
    assert second.few.mlp.down_proj.weight.data_ptr() == weight.data_ptr()
    assert isinstance(model.model.layers[1].mlp.down_proj, PackedLinear) and isinstance(model.lm_head, FewOrMany)


@needs_compiler
def test_what_cannot_be_compiled_whole_is_compiled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = tiny("qwen2_moe", dtype=torch.float32)  # which of its layers a token meets is known only then
    prepare(experts, compile=True)
    assert not forwards(experts) and isinstance(experts.model.layers[0].self_attn.o_proj, FewOrMany)

    original = decode.compiled.run_compiled
    monkeypatch.setattr(decode.compiled, "run_compiled", lambda *args: original(*args) * 1.01)
    wrong = tiny("llama", dtype=torch.float32)
    prepare(wrong, compile=True)
    assert not forwards(wrong) and isinstance(wrong.model.layers[0].self_attn.o_proj, FewOrMany)


@needs_compiler
def test_a_wrong_layer_is_found_out_beside_huge_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", dtype=torch.float32)
    model.get_input_embeddings().weight.data[:, 0] = 1e4  # as in real models, to which layers add little
    original = decode.compiled.run_compiled
    monkeypatch.setattr(decode.compiled, "run_compiled", lambda *args: original(*args) + 0.01)
    prepare(model, compile=True)
    assert not forwards(model)


@needs_compiler
def test_trees_are_verified_by_compiled_layers_when_a_model_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_up_to(FEW, monkeypatch)
    shapes: list[tuple[int, ...]] = []
    original = decode.compiled.run_compiled
    model = prepare(tiny("llama", dtype=torch.float32), compile=True)
    monkeypatch.setattr(
        decode.compiled, "run_compiled", lambda *args: shapes.append(args[2][0].shape[:2]) or original(*args)
    )
    assert Target(model).self_test_error < 1e-3
    assert shapes == [(1, 5)] * 4  # two trees, two layers


@needs_compiler
def test_another_number_of_threads_goes_to_the_packed_layers_until_compiled_for() -> None:
    target = Target(tiny("llama", dtype=torch.float32), compile=True)
    session, threads = target.open(1), torch.get_num_threads()
    tree = Tree.chain([[4]])
    try:
        with torch.inference_mode():
            expected = [session.verify(tree).logits for _ in range(2)][1]
            torch.set_num_threads(threads + 1)
            with torch._dynamo.config.patch(error_on_recompile=True):
                assert torch.allclose(session.verify(tree).logits, expected, atol=1e-5)
            generate(target, PROMPTS[:1], max_new_tokens=3)
            assert all(sum(layer.kernels.values()) == 4 for layer in forwards(target.model))
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_a_layer_that_writes_to_another_part_of_the_cache_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", dtype=torch.float32)
    monkeypatch.setattr(decode.compiled, "_number", lambda layer: 1 - layer.self_attn.layer_idx)
    prepare(model, compile=True)
    assert not forwards(model)


@needs_compiler
def test_nothing_is_compiled_amid_an_answer() -> None:
    model = tiny("gemma3_text", dtype=torch.float32, max_position_embeddings=600)
    target = Target(model, compile=True)
    assert len(forwards(target.model)) == len(model.model.layers)
    plain = generate(Target(model), [[5]], max_new_tokens=530, stop_ids=())[0]  # the cache grows twice
    for proposer in (None, *[NGramProposer(length=length) for length in (1, 2)]):
        with torch._dynamo.config.patch(error_on_recompile=True):
            answer = generate(target, [[5]], proposer, max_new_tokens=530, stop_ids=())[0]
        assert answer.tokens == plain.tokens
    target.open(2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        answers = generate(target, [[5], [3, 4]], max_new_tokens=530, stop_ids=plain.tokens[300:301])
    lengths = [len(answer.tokens) for answer in answers]
    assert lengths[0] != lengths[1] and answers[0].tokens == plain.tokens[: lengths[0]]


@needs_compiler
def test_what_cannot_be_compiled_for_a_batch_is_left_to_the_packed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny("llama", dtype=torch.float32), compile=True)
    expected = [generate(target, [prompt], max_new_tokens=9)[0].tokens for prompt in PROMPTS]
    original = decode.compiled.run_compiled
    monkeypatch.setattr(decode.compiled, "run_compiled", lambda *args: original(*args) * 1.01)
    target.open(2)
    monkeypatch.undo()
    compile_up_to(2, monkeypatch)
    for layer in forwards(target.model):
        assert {key[:2]: made for key, made in layer.kernels.items()} == {(1, 1): True, (1, 2): True, (2, 1): False}
    assert [answer.tokens for answer in generate(target, PROMPTS, max_new_tokens=9)] == expected


@needs_compiler
def test_features_are_those_of_the_plain_model() -> None:
    model = tiny("llama", dtype=torch.float32)
    found = []
    for target in (Target(model), Target(model, compile=True)):
        session = target.open(1, layers=(1, -1))
        with torch.inference_mode():
            session.extend(PROMPTS[:1])
            found.append([session.verify(Tree.chain([[4] * nodes])).features for nodes in (1, 2, 3)])
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*found, strict=True))


@needs_compiler
def test_more_kinds_are_compiled_than_torch_would() -> None:
    model = nn.Sequential(*[nn.Linear(8 + number, 9 + number) for number in range(5)])
    with torch.inference_mode():
        inputs = torch.randn(1, 8)
        expected = model(inputs)
        pack_layers(model, FewOrMany)
        assert torch.allclose(model(inputs), expected, atol=1e-5)


@needs_compiler
def test_hooks_and_other_forwards_are_kept() -> None:
    model = tiny("llama", dtype=torch.float32, num_hidden_layers=3)
    first, second, third = model.model.layers
    seen: list[str] = []
    original = first.mlp.forward
    first.mlp.forward = lambda inputs: seen.append("forward") or original(inputs)
    second.mlp.register_forward_hook(lambda *_: seen.append("hook within"))
    third.register_forward_hook(lambda *_: seen.append("hook"))
    prepare(model, compile=True)
    assert [layer.number for layer in forwards(model)] == [2]
    target = Target(model)
    seen.clear()
    generate(target, PROMPTS[:1], max_new_tokens=3)
    assert seen == ["forward", "hook within", "hook"] * 3
    target.model.model.layers[2].mlp.register_forward_hook(lambda *_: seen.append("late hook"))
    seen.clear()
    generate(target, PROMPTS[:1], max_new_tokens=3)
    assert seen == ["forward", "hook within", "late hook", "hook"] * 3


@needs_compiler
def test_what_a_hook_makes_of_a_layer_is_no_reason_not_to_compile_it() -> None:
    model = tiny("llama", dtype=torch.float32)
    model.model.layers[0].register_forward_hook(lambda layer, args, output: output * 1.5)
    plain, compiled = Target(model), Target(model, compile=True)
    assert len(forwards(compiled.model)) == 2
    answers = [generate(target, PROMPTS, max_new_tokens=9) for target in (plain, compiled)]
    assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]


@needs_compiler
def test_weights_are_freed_with_the_model() -> None:
    model = prepare(tiny("llama", dtype=torch.float32), compile=True)
    layer = ref(model.model.layers[0])
    gc.collect()
    gc.disable()
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()


def test_more_than_a_few_tokens_go_to_the_packed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def run(function: Any, *args: Any) -> Any:
        calls.append(function.__name__)
        return function(*args)

    for module in (decode.compiled, decode.kernels):
        monkeypatch.setattr(module, "run_compiled", run)
    target = Target(tiny("llama", dtype=torch.float32), compile=True)
    one, two, three = (target.open(rows) for rows in (1, 2, 3))
    steps = ((one, 1), (one, 1), (one, 2), (one, 3), (two, 1), (two, 1), (two, 2), (three, 1))
    # Before the first of a session no cache is there.
    for (session, nodes), expected in zip(steps, (OUTPUT, WHOLE, WHOLE, [], OUTPUT, WHOLE, [], []), strict=True):
        calls.clear()
        with torch.inference_mode():
            session.verify(Tree.chain([[4] * nodes] * len(session.lengths)))
        assert calls == expected
    calls.clear()
    target.open(1).verify(Tree.chain([[4]]))  # not in the loop's mode
    target.open(2)
    assert not calls


@needs_compiler
def test_bfloat16_is_summed_up_as_exactly_as_by_the_dense_layer() -> None:
    torch.manual_seed(0)
    linear, inputs = nn.Linear(512, 64, dtype=torch.bfloat16).requires_grad_(False), torch.randn(1, 1, 512).bfloat16()
    exact = linear.double()(inputs.double())
    linear = linear.bfloat16()
    with torch.inference_mode():
        errors = [(layer(inputs).double() - exact).abs().max() for layer in (linear, FewOrMany(linear))]
    assert errors[1] <= 1.5 * errors[0]


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nothing to compile"):
        Target(tiny("llama"), compile=True)  # in float64
    with pytest.raises(ValueError, match="packed already"):
        Target(prepare(tiny("llama", dtype=torch.float32)), compile=True)

    with monkeypatch.context() as patch:
        for module in (decode.packed, decode.kernels):
            patch.setattr(module, "can_pack", lambda module: False)
        patch.setattr(decode.compiled, "_watch_layers", lambda model, shape: {})
        with pytest.raises(ValueError, match="no linear layers in float32 or bfloat16"):
            compile_model(tiny("llama", dtype=torch.float32))

    def fail(*_: object) -> None:
        raise RuntimeError("no compiler found\nand a long story")

    for module in (decode.compiled, decode.kernels):
        monkeypatch.setattr(module, "run_compiled", fail)
    with pytest.raises(ValueError, match=r"\(RuntimeError: no compiler found\); it needs a C\+\+ compiler"):
        compile_model(tiny("llama", dtype=torch.float32))
    monkeypatch.setattr(decode.kernels, "run_compiled", lambda function, *args: function(*args) * 1.01)
    with pytest.raises(ValueError, match=r"is off by 1\.0e-02 of its largest number"):
        compile_model(tiny("llama", dtype=torch.float32))
