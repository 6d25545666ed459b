"""Compiled kernels change a model's speed and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import decode.cpu.acceleration
import decode.cpu.compiled_model
import decode.cpu.linear_kernels
import decode.cpu.packed_linear
from decode import Target, generate
from decode.cpu.acceleration import accelerate
from decode.cpu.compiled_layer import CompiledLayer
from decode.cpu.compiled_model import compile_model, compiled_layers
from decode.cpu.kernel_cache import Kernel
from decode.cpu.kernel_source import KernelSource, name_kernel
from decode.cpu.linear_kernels import MAX_LAYER_TOKENS, CompiledLinear
from decode.cpu.packed_linear import PackedLinear
from decode.models.self_test import self_test
from decode.tree import Tree
from proposers import NGramProposer
from tests.models import needs_compiler, tiny

PROMPTS = [[5, 6, 7, 5, 6, 7, 8, 9, 10, 11, 12], [3]]
OUTPUT = ["linear"]  # the output layer
LAYERS = ["layer", "layer", *OUTPUT]  # and two decoder layers
MAKERS = decode.cpu.compiled_model, decode.cpu.linear_kernels


@pytest.fixture(autouse=True)
def few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_up_to(2, monkeypatch)  # tokens: each number takes seconds


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces compiled kernels by the functions that they are compiled from. Returns a list of their calls."""
    seen: list[str] = []

    def make(source: KernelSource) -> Kernel:
        kind = "linear" if source.description == "linear" else "layer"

        def kernel(inputs: list[Tensor]) -> list[Tensor]:
            seen.append(kind)
            return source.compute(inputs)

        return kernel

    def obtain(sources: Sequence[KernelSource], *, retry_failed: bool = False) -> list[Kernel | str]:
        return [make(source) for source in sources]

    patch_obtaining(monkeypatch, obtain)
    return seen


def patch_obtaining(monkeypatch: pytest.MonkeyPatch, obtain: Callable[..., Any]) -> None:
    for module in MAKERS:
        monkeypatch.setattr(module, "obtain_kernels", obtain)


def compile_up_to(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MAKERS:
        monkeypatch.setattr(module, "MAX_LAYER_TOKENS", tokens)
    monkeypatch.setattr(decode.cpu.linear_kernels, "MAX_LINEAR_TOKENS", tokens)


def change_layers(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Change the output of compiled layers."""
    original = CompiledLayer._run
    monkeypatch.setattr(CompiledLayer, "_run", lambda *args: [change(original(*args)[0])])


def forwards(model: PreTrainedModel) -> list[Any]:
    return [layer.forward for layer in compiled_layers(model)]


@needs_compiler
@pytest.mark.parametrize(("size", "bias"), [(70, False), (70, True), (5000, True)])
def test_a_compiled_linear_layer_computes_the_same_as_the_dense_one(size: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(size, 100, bias=bias).requires_grad_(False)
    layer = CompiledLinear(linear)
    assert len(layer.kernels) == 2
    for shape in ((), (1,), (1, 1), (3,), (2, 2), (2, 5)):
        inputs = torch.randn(*shape, size)
        with torch.inference_mode():
            assert torch.allclose(layer(inputs), linear(inputs), atol=1e-5)
        assert torch.allclose(layer(inputs), linear(inputs), atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(("kind", "few", "whole"), [("llama", 2, 2), ("gpt2", 1, 2), ("qwen2_moe", 1, 0)])
def test_a_compiled_model_generates_the_same_tokens(
    kind: str, few: int, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_up_to(few, monkeypatch)
    model = tiny(kind, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain, compiled = Target(model), Target(model, accelerate="compiled")
    assert len(forwards(compiled.model)) == whole and compiled.compiled and not plain.compiled
    assert torch.equal(plain.output_matrix, compiled.output_matrix)
    for proposer in (None, NGramProposer(length=4)):
        for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[1:]):
            answers = [generate(target, prompts, proposer, max_new_tokens=20) for target in (plain, compiled)]
            assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(all(layer.tried.values()) for layer in forwards(compiled.model))


@needs_compiler
def test_kernels_serve_caches_of_all_sizes_and_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_up_to(1, monkeypatch)
    model = tiny("gemma3_text", dtype=torch.float32, max_position_embeddings=600)
    compiled, threads = Target(model, accelerate="compiled"), torch.get_num_threads()
    expected = generate(Target(model), [[5]], max_new_tokens=530, stop_ids=())[0]  # the cache grows twice
    layer = forwards(compiled.model)[0]
    used = []
    original = CompiledLayer._run
    monkeypatch.setattr(CompiledLayer, "_run", lambda self, *args: used.append(self) or original(self, *args))
    try:
        torch.set_num_threads(threads + 1)
        answer = generate(compiled, [[5]], max_new_tokens=530, stop_ids=())[0]
    finally:
        torch.set_num_threads(threads)
    assert answer.tokens == expected.tokens and used.count(layer) == 529


@needs_compiler
def test_bfloat16_sums_are_as_exact_as_in_the_dense_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_up_to(1, monkeypatch)
    torch.manual_seed(0)
    linear, inputs = nn.Linear(512, 64, dtype=torch.bfloat16).requires_grad_(False), torch.randn(1, 1, 512).bfloat16()
    exact = linear.double()(inputs.double())
    layer = CompiledLinear(linear.bfloat16())
    assert layer.kernels
    with torch.inference_mode():
        errors = [(some(inputs).double() - exact).abs().max() for some in (linear, layer)]
    assert errors[1] <= 1.5 * errors[0]


def test_compiled_decoder_layers_share_the_models_tensors(calls: list[str]) -> None:
    model = tiny("llama", dtype=torch.float32)
    weight = model.model.layers[1].mlp.down_proj.weight
    accelerate(model, "compiled")
    first, second = forwards(model)
    assert (first.number, second.number) == (0, 1)
    assert any(tensor.data_ptr() == weight.data_ptr() for tensor in second._tensors.values())
    assert isinstance(model.model.layers[1].mlp.down_proj, PackedLinear) and isinstance(model.lm_head, CompiledLinear)


def test_layers_alike_share_a_kernel_and_others_do_not(calls: list[str]) -> None:
    def names(model: PreTrainedModel) -> list[tuple[str, str]]:
        """The key and the kernel's name of each layer."""
        found: list[KernelSource] = []
        original = decode.cpu.compiled_model.obtain_kernels

        def obtain(sources: Sequence[KernelSource], **options: Any) -> Any:
            found.extend(source for source in sources if source.description != "linear")
            return original(sources, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode.cpu.compiled_model, "MAX_LAYER_TOKENS", 1)
            patch.setattr(decode.cpu.compiled_model, "obtain_kernels", obtain)
            compile_model(model)
        return [(source.key, name_kernel(source.export())) for source in found]

    llama = names(tiny("llama", dtype=torch.float32))
    assert len(llama) == 2 and len({*llama}) == 1
    assert names(tiny("llama", dtype=torch.float32)) == llama  # other weights
    for other in ({"rms_norm_eps": 0.1}, {"hidden_act": "relu"}, {"intermediate_size": 32}, {"dtype": torch.bfloat16}):
        for key, name in names(tiny("llama", **{"dtype": torch.float32, **other})):
            assert key != llama[0][0] and name != llama[0][1]
    assert len({key for key, _ in names(tiny("gemma3_text", dtype=torch.float32))}) == 2  # with windows, and without


@pytest.mark.parametrize("change", [lambda states: states * 1.01, lambda states: states * torch.nan])
def test_linear_layers_are_compiled_where_decoder_layers_cannot_be(
    change: Callable[[Tensor], Tensor], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_layers(monkeypatch, change)
    model = tiny("llama", dtype=torch.float32)
    accelerate(model, "compiled")
    assert not forwards(model) and isinstance(model.model.layers[0].self_attn.o_proj, CompiledLinear)


def test_a_wrong_kernel_is_noticed_despite_huge_states(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", dtype=torch.float32)
    model.get_input_embeddings().weight.data[:, 0] = 1e4  # as in real models; layers add little to such states
    change_layers(monkeypatch, lambda states: states + 0.01)
    accelerate(model, "compiled")
    assert not forwards(model)


def test_a_kernel_that_writes_to_another_layers_cache_is_noticed(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", dtype=torch.float32)
    monkeypatch.setattr(decode.cpu.compiled_model, "find_cache_layer", lambda layer: 1 - layer.self_attn.layer_idx)
    accelerate(model, "compiled")
    assert not forwards(model)


def test_a_linear_layer_without_correct_kernels_stays_packed(calls: list[str]) -> None:
    model = tiny("llama", dtype=torch.float32)

    def fail(inputs: list[Tensor]) -> list[Tensor]:
        raise RuntimeError("of another size")

    for kernel in (fail, lambda inputs: [inputs[0].new_full((len(inputs[0]), len(inputs[1])), 7.0)]):
        with pytest.MonkeyPatch.context() as patch:
            patch_obtaining(patch, lambda sources, kernel=kernel, **_: [kernel] * len(sources))
            layer = CompiledLinear(model.lm_head)
        assert not layer.kernels
        inputs = torch.randn(2, 32)
        with torch.no_grad():
            assert torch.allclose(layer(inputs), model.lm_head(inputs), atol=1e-5)


def test_the_self_test_runs_compiled_layers(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_up_to(MAX_LAYER_TOKENS, monkeypatch)
    model = accelerate(tiny("llama", dtype=torch.float32), "compiled")
    calls.clear()
    target = Target(model)
    assert calls.count("layer") == 4  # two trees, two layers
    assert self_test(target) < 1e-3


def test_nothing_is_compiled_after_the_warm_up(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny("llama", dtype=torch.float32), accelerate="compiled")
    target.warm_up(2, measure=False)
    monkeypatch.delattr(decode.cpu.compiled_model, "obtain_kernels")
    for proposer in (None, *[NGramProposer(length=length) for length in (1, 2)]):
        for prompts in (PROMPTS[:1], PROMPTS):
            generate(target, prompts, proposer, max_new_tokens=100)


def test_batches_without_correct_kernels_run_the_packed_layers(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(tiny("llama", dtype=torch.float32), accelerate="compiled")
    expected = [generate(target, [prompt], max_new_tokens=9)[0].tokens for prompt in PROMPTS]
    with monkeypatch.context() as patch:
        change_layers(patch, lambda states: states * 1.01)
        target.warm_up(2, measure=False)
    for layer in forwards(target.model):
        assert layer.tried == {(1, 1): True, (1, 2): True, (2, 1): False}
    assert [answer.tokens for answer in generate(target, PROMPTS, max_new_tokens=9)] == expected


def test_features_are_those_of_the_plain_model(calls: list[str]) -> None:
    model = tiny("llama", dtype=torch.float32)
    found = []
    for target in (Target(model), Target(model, accelerate="compiled")):
        session = target.open(1, layers=(1, -1))
        with torch.inference_mode():
            session.extend(PROMPTS[:1])
            found.append([session.verify(Tree.chain([[4] * nodes])).features for nodes in (1, 2, 3)])
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*found, strict=True))


def test_hooks_and_other_forwards_are_kept(calls: list[str]) -> None:
    model = tiny("llama", dtype=torch.float32, num_hidden_layers=3)
    first, second, third = model.model.layers
    seen: list[str] = []
    original = first.mlp.forward
    first.mlp.forward = lambda inputs: seen.append("forward") or original(inputs)
    second.mlp.register_forward_hook(lambda *_: seen.append("hook within"))
    third.register_forward_hook(lambda *_: seen.append("hook"))
    accelerate(model, "compiled")
    assert [layer.number for layer in forwards(model)] == [2]
    target = Target(model)
    seen.clear()
    generate(target, PROMPTS[:1], max_new_tokens=3)
    assert seen == ["forward", "hook within", "hook"] * 3
    target.model.model.layers[2].mlp.register_forward_hook(lambda *_: seen.append("late hook"))
    seen.clear()
    generate(target, PROMPTS[:1], max_new_tokens=3)
    assert seen == ["forward", "hook within", "late hook", "hook"] * 3


def test_a_layer_with_a_hook_on_its_output_is_compiled(calls: list[str]) -> None:
    model = tiny("llama", dtype=torch.float32)
    model.model.layers[0].register_forward_hook(lambda layer, args, output: output * 1.5)
    plain, compiled = Target(model), Target(model, accelerate="compiled")
    assert len(forwards(compiled.model)) == 2
    answers = [generate(target, PROMPTS, max_new_tokens=9) for target in (plain, compiled)]
    assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]


def test_weights_are_freed_with_the_model(calls: list[str]) -> None:
    model = accelerate(tiny("llama", dtype=torch.float32), "compiled")
    layer = ref(model.model.layers[0])
    gc.collect()
    gc.disable()
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()


def test_more_tokens_run_the_packed_layers(calls: list[str]) -> None:
    target = Target(tiny("llama", dtype=torch.float32), accelerate="compiled")
    for rows in (2, 3):
        target.warm_up(rows, measure=False)
    one, two, three = (target.open(rows) for rows in (1, 2, 3))
    steps = ((one, 1), (one, 1), (one, 2), (one, 3), (two, 1), (two, 1), (two, 2), (three, 1))
    # In the first pass of a session the cache is empty.
    for (session, nodes), expected in zip(steps, (OUTPUT, LAYERS, LAYERS, [], OUTPUT, LAYERS, [], []), strict=True):
        calls.clear()
        session.verify(Tree.chain([[4] * nodes] * len(session.lengths)))
        assert calls == expected


def test_kernels_do_not_run_with_gradients(calls: list[str]) -> None:
    target = Target(tiny("llama", dtype=torch.float32), accelerate="compiled")
    session = target.open(1)
    session.extend(PROMPTS[:1])
    calls.clear()
    with torch.enable_grad():
        target.model(torch.tensor([[4]]), past_key_values=session.cache, position_ids=torch.tensor([[11]]))
    assert not calls
    session.verify(Tree.chain([[4]]))
    assert calls == LAYERS


def test_models_that_cannot_be_compiled_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nothing to compile"):
        Target(tiny("llama"), accelerate="compiled")  # in float64
    with pytest.raises(ValueError, match="packed already"):
        Target(accelerate(tiny("llama", dtype=torch.float32)), accelerate="compiled")

    model = tiny("llama", dtype=torch.float32)
    before = {name: type(module) for name, module in model.named_modules()}
    patch_obtaining(monkeypatch, lambda sources, **_: ["no compiler found"] * len(sources))
    with pytest.raises(ValueError, match=r"\(no compiler found\); it needs a C\+\+ compiler"):
        compile_model(model)

    def fail(*_: object, **__: object) -> None:
        raise PermissionError("no room")

    patch_obtaining(monkeypatch, fail)
    with pytest.raises(ValueError, match="cannot keep compiled kernels: no room"):
        compile_model(model)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_auto_compiles_models_of_medium_size(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny("llama", dtype=torch.float32)
    size = sum(part.weight.nbytes for part in model.modules() if isinstance(part, nn.Linear))
    monkeypatch.setattr(decode.cpu.acceleration.shutil, "which", lambda name: name)
    for sizes, compiled in (((size + 1, 2 * size), False), ((1, size - 1), False), ((size, size), True)):
        monkeypatch.setattr(decode.cpu.acceleration, "COMPILED_BYTES", sizes)
        assert Target(model, accelerate="auto").compiled == compiled
        assert not Target(model).compiled and not Target(model, accelerate="packed").compiled
        assert Target(model, accelerate="compiled").compiled
    monkeypatch.setattr(decode.cpu.acceleration.shutil, "which", lambda name: None)
    assert not Target(model, accelerate="auto").compiled
    monkeypatch.setattr(decode.cpu.acceleration.shutil, "which", lambda name: name)
    assert not capsys.readouterr().err
    patch_obtaining(monkeypatch, lambda sources, **_: ["no headers"] * len(sources))
    assert not Target(model, accelerate="auto").compiled
    assert "(no headers)" in capsys.readouterr().err
