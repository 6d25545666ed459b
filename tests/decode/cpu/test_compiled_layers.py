"""Compiled decoder layers change a model's speed and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode import Target, generate
from decode.cpu import backend, compiled_layers
from decode.cpu.compiled_layers import CompiledLayer
from decode.cpu.layer_kernel import Kernel
from decode.cpu.packed_linear import PackedLinear
from decode.prefill import read_texts
from decode.trees.tree import Tree
from proposers import NGramProposer
from tests.support.models import CACHE, needs_compiler, tiny

pytestmark = needs_compiler
PROMPTS = [[5, 6, 7, 5, 6, 7, 8, 9, 10, 11, 12], [3]]


def plain_and_compiled(kind: str, **settings: Any) -> tuple[Target, Target]:
    model = tiny(kind, **{"dtype": torch.float32, **settings})
    return Target(model), Target(model, accelerate="compiled")


def layers_of(model: PreTrainedModel) -> list[CompiledLayer]:
    return compiled_layers.compiled_layers(model)


def change_kernels(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Change the states that kernels return."""
    load = compiled_layers.load_kernel

    def load_changed(path: Any) -> Kernel:
        kernel = load(path)
        return lambda *given: [change(kernel(*given)[0])]

    monkeypatch.setattr(compiled_layers, "load_kernel", load_changed)


def assert_same_tokens(plain: Target, compiled: Target) -> None:
    for proposer in (None, NGramProposer(length=4)):
        for prompts in (PROMPTS[:1], [*PROMPTS, [7, 8, 9] * 30, [4] * 5, [50, 60]]):
            answers = [generate(target, prompts, proposer, max_new_tokens=12) for target in (plain, compiled)]
            assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]


@pytest.mark.parametrize(
    ("kind", "dtype", "count"),
    [
        ("llama", torch.float32, 2),
        pytest.param("llama", torch.bfloat16, 2, marks=pytest.mark.slow),
        pytest.param("gemma3_text", torch.float32, 3, marks=pytest.mark.slow),
        pytest.param("gpt2", torch.float32, 2, marks=pytest.mark.slow),
        pytest.param("gpt2", torch.bfloat16, 2, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", torch.float32, 2, marks=pytest.mark.slow),
    ],
)
def test_kernels_of_several_architectures(kind: str, dtype: torch.dtype, count: int) -> None:
    """Really compiled, for all sizes of batches, trees and caches, and any number of threads."""
    plain, compiled = plain_and_compiled(kind, dtype=dtype, max_position_embeddings=600)
    assert len(layers_of(compiled.model)) == count and compiled.compiled == (count > 0) and not plain.compiled
    allowed = 1e-4 if dtype == torch.float32 else 1.0  # wrong logits differ by more than 3
    assert_close_on_all_sizes(plain, compiled, allowed)
    if dtype == torch.float32:
        assert_same_tokens(plain, compiled)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert_close_on_all_sizes(plain, compiled, allowed)
    finally:
        torch.set_num_threads(threads)
    if kind == "llama":
        first = layers_of(compiled.model)[0]
        first._tensors = [torch.zeros_like(each) if each.dtype == torch.uint8 else each for each in first._tensors]
        with pytest.raises(RuntimeError, match="inputs must have the 0 columns of the packed weight"):
            compiled.open(1).verify(Tree.chain([[3, 4]]))


@pytest.mark.slow
def test_a_model_made_in_inference_mode_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own tensors cannot be exported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where no kernel is
    with torch.inference_mode():
        _, compiled = plain_and_compiled("llama", dtype=torch.bfloat16)
        assert len(layers_of(compiled.model)) == 2


def assert_close_on_all_sizes(plain: Target, compiled: Target, allowed: float) -> None:
    """Logits, in standard deviations. The cache grows twice, rows are ragged, each step verifies another tree."""
    for rows in (1, 2, 3, 7):
        sessions = [target.open(rows) for target in (plain, compiled)]
        for nodes in (40, 1, 2, 3, 5, 16, 33, 64, 1, 300, 90):
            if nodes < 60 or rows < 3:
                tree = Tree.chain([[(7 * row + 3 * node) % 90 + 3 for node in range(nodes)] for row in range(rows)])
                expected, found = (session.verify(tree).logits.float() for session in sessions)
                assert float((expected - found).abs().max() / expected.std()) < allowed
                for session in sessions:
                    session.keep([range(max(nodes - row, 1)) for row in range(rows)])


def test_a_kernel_serves_all_numbers_of_rows_nodes_and_slots(exported: list[str]) -> None:
    plain, compiled = plain_and_compiled("llama", max_position_embeddings=600)
    assert len({*exported}) == 1
    exported.clear()
    assert_close_on_all_sizes(plain, compiled, 1e-4)
    assert len(exported) == 2 * (2 * 11 + 2 * 8)  # all passes


def test_compiled_layers_share_the_models_tensors_and_are_freed_with_it(exported: list[str]) -> None:
    model = tiny("llama", dtype=torch.float32)
    norm = model.model.layers[1].input_layernorm.weight
    Target(model, accelerate="compiled", in_place=True)
    first, second = layers_of(model)
    assert (first.number, second.number) == (0, 1)
    for shared in (norm, model.model.layers[1].mlp.down_proj.packed):
        assert any(tensor.data_ptr() == shared.data_ptr() for tensor in second._tensors)
    layer = ref(model.model.layers[0])
    del first, second
    gc.collect()
    gc.disable()
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "change", [lambda states: states * 1.01, lambda states: states * torch.nan, lambda states: states[:, :1]]
)
def test_layers_with_a_wrong_kernel_stay_packed(
    change: Callable[[Tensor], Tensor], exported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_kernels(monkeypatch, change)
    model = Target(tiny("llama", dtype=torch.float32), accelerate="compiled", in_place=True).model
    assert exported and not layers_of(model) and isinstance(model.model.layers[0].self_attn.o_proj, PackedLinear)


def test_a_wrong_kernel_is_noticed_despite_huge_states(exported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", dtype=torch.float32)
    model.get_input_embeddings().weight.data[:, 0] = 1e4  # as in real models; layers add little to such states
    assert layers_of(Target(model, accelerate="compiled").model)
    compiled_layers._LOADED.clear()
    change_kernels(monkeypatch, lambda states: states + 0.01)
    assert not layers_of(Target(model, accelerate="compiled").model)


def test_a_kernel_that_writes_to_another_layers_cache_is_noticed(
    exported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", dtype=torch.float32)
    monkeypatch.setattr(compiled_layers, "_find_cache_layer", lambda layer: 1 - layer.self_attn.layer_idx)
    assert not layers_of(Target(model, accelerate="compiled", in_place=True).model)


def test_a_pass_computes_layers_of_a_kind_in_one_call_up_to_one_that_is_watched(
    exported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, compiled = plain_and_compiled("llama", num_hidden_layers=4)
    layers = layers_of(compiled.model)
    counts: list[int] = []
    for layer in layers:
        kernel = layer._kernel
        monkeypatch.setattr(
            layer, "_kernel", lambda *given, run=kernel: counts.append(len(given[2]) // 2) or run(*given)
        )

    def compare(*expected: int) -> None:
        found = []
        for target in (plain, compiled):
            session = target.open(1)
            with torch.inference_mode():
                read_texts(session, PROMPTS[:1])
                counts.clear()
                found.append(session.verify(Tree.chain([[4, 5, 6]])).logits)
        assert counts == [*expected] and torch.allclose(*found, atol=1e-5)

    compare(4)
    watched = [target.model.model.layers for target in (plain, compiled)]
    for change, expected in (
        (lambda layer: layer.register_forward_hook(lambda module, args, output: output * 1.5), (3, 1)),
        (lambda layer: layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,)), (2, 2)),
        (lambda layer: layer.mlp.register_forward_hook(lambda module, args, output: output * 1.5), (2, 1)),
    ):
        handles = [change(stack[2]) for stack in watched]
        compare(*expected)
        for handle in handles:
            handle.remove()
    compare(4)
    monkeypatch.setattr(watched[1][1], "forward", lambda *args, **kwargs: layers[1](*args, **kwargs))
    compare(1, 1, 2)


def test_a_layer_that_takes_states_by_name_is_called_alone() -> None:
    states = torch.zeros(1, 1, 32)
    call: Any = None
    before = compiled_layers.RecordedCall(call, (states,), {}, states)
    assert before.continues(before)
    named = compiled_layers.RecordedCall(call, (), {"hidden_states": states}, states)
    assert not named.continues(before) and not named.continues(named)


def test_a_layer_with_other_arguments_than_in_the_trials_is_an_error(exported: list[str]) -> None:
    _, compiled = plain_and_compiled("llama")
    second = layers_of(compiled.model)[1]
    session = compiled.open(1)
    read_texts(session, PROMPTS[:1])
    states, cache = torch.zeros(1, 1, 32), session.cache
    cache.computed = compiled_layers.ComputedLayers(1, states, (), {"attention_mask": None, "past_key_values": cache})
    with pytest.raises(RuntimeError, match="layer 1 has other arguments than in the trials"):
        second(states, attention_mask=torch.zeros(1, 1, 1, 64), past_key_values=cache)


def test_features_are_those_of_the_plain_model(exported: list[str]) -> None:
    found = []
    for target in plain_and_compiled("llama"):
        session = target.open(1, layers=(1, -1))
        with torch.inference_mode():
            read_texts(session, PROMPTS[:1])
            found.append([session.verify(Tree.chain([[4] * nodes])).features for nodes in (1, 2, 30)])
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*found, strict=True))


def test_hooks_and_other_forwards_are_kept(exported: list[str]) -> None:
    model = tiny("llama", dtype=torch.float32, num_hidden_layers=3)
    first, second, third = model.model.layers
    seen: list[str] = []
    original = first.mlp.forward
    first.mlp.forward = lambda inputs: seen.append("forward") or original(inputs)
    second.mlp.register_forward_hook(lambda *_: seen.append("hook within"))
    third.register_forward_hook(lambda *_: seen.append("hook"))
    Target(model, accelerate="compiled", in_place=True)
    assert [layer.number for layer in layers_of(model)] == [2]
    target = Target(model)
    seen.clear()
    generate(target, PROMPTS[:1], None, max_new_tokens=3)
    assert seen == ["forward", "hook within", "hook"] * 3
    target.model.model.layers[2].mlp.register_forward_hook(lambda *_: seen.append("late hook"))
    seen.clear()
    generate(target, PROMPTS[:1], None, max_new_tokens=3)
    assert seen == ["forward", "hook within", "late hook", "hook"] * 3


def test_a_layer_with_a_hook_on_its_output_is_compiled(exported: list[str]) -> None:
    model = tiny("llama", dtype=torch.float32)
    model.model.layers[0].register_forward_hook(lambda layer, args, output: output * 1.5)
    plain, compiled = Target(model), Target(model, accelerate="compiled")
    assert len(layers_of(compiled.model)) == 2
    assert_same_tokens(plain, compiled)


def test_other_calls_run_the_layer_itself(exported: list[str]) -> None:
    """With gradients, without a cache, with transformers' cache."""
    plain, compiled = plain_and_compiled("llama")
    session, ids = compiled.open(1), torch.tensor([[4, 5]])
    read_texts(session, PROMPTS[:1])
    exported.clear()
    with torch.enable_grad():
        compiled.model(ids[:, :1], **{CACHE: session.cache}, position_ids=torch.tensor([[11]]))
    with torch.inference_mode():
        for use_cache in (False, True):
            logits = [target.model(ids, use_cache=use_cache).logits for target in (plain, compiled)]
            assert torch.allclose(*logits, atol=1e-4)
    assert not exported
    session.verify(Tree.chain([[4]]))
    assert len(exported) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_in_another_dtype_computes_what_it_should(dtype: torch.dtype, exported: list[str]) -> None:
    plain, compiled = plain_and_compiled("llama")
    exported.clear()
    for target in (plain, compiled):
        target.model.to(dtype)
    logits = [target.model(torch.tensor(PROMPTS[:1])).logits.float() for target in (plain, compiled)]
    assert torch.allclose(*logits, atol=1e-4 if dtype == torch.float64 else 0.5)
    assert Target(compiled.model).dtype == dtype and not exported


def test_models_that_cannot_be_compiled_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to compile"):
        Target(tiny("llama"), accelerate="compiled")  # in float64
    with pytest.raises(ValueError, match="packed already"):
        Target(Target(tiny("llama", dtype=torch.float32), accelerate="packed").model, accelerate="compiled")


def test_auto_compiles_large_models(exported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", dtype=torch.float32)
    size = sum(part.weight.nbytes for part in model.modules() if isinstance(part, nn.Linear))
    for worth, compiled in ((size + 1, False), (size, True)):
        monkeypatch.setattr(backend, "WORTH_COMPILING", worth)
        assert Target(model, accelerate="auto").compiled == compiled
        assert not Target(model).compiled and not Target(model, accelerate="packed").compiled
        assert Target(model, accelerate="compiled").compiled
