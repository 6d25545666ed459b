"""Refused by name: wrong windows, proposers in two streams, row-coupled models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode import Chunk, Step, Target, Tree, generate, self_test, stream
from decode.models import facts
from decode.models.compatibility import AttentionWindow, attention_windows
from decode.trees.masks import tree_masks
from proposers import NGramProposer
from tests.support.models import tiny

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9, 10]]


def test_a_proposer_in_two_threads_is_refused(target: Target) -> None:
    """The second thread is refused while the first drafts, and the first one's text stays the same."""
    drafting, refused = threading.Event(), threading.Event()

    class Slow(NGramProposer):
        def propose(self, step: Step, budget: int) -> Tree:
            drafting.set()
            assert refused.wait(60)
            return super().propose(step, budget)

    shared, found = Slow(length=3), list[Any]()
    settings: dict[str, Any] = {"max_new_tokens": 12, "stop_ids": []}
    thread = threading.Thread(target=lambda: found.extend(generate(target, PROMPTS, shared, **settings)))
    thread.start()
    assert drafting.wait(60)
    with pytest.raises(RuntimeError, match="this Slow is used by two streams at once"):
        generate(target, PROMPTS, shared, **settings)
    refused.set()
    thread.join()
    expected = generate(target, PROMPTS, None, **settings)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]


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


def couple_columns(module: torch.nn.Linear, args: Any, output: Tensor) -> Tensor:
    """As LLM.int8: columns with an outlier in any row stay exact, the others are quantised, each row by its scale."""
    states = args[0]
    exact = (states.abs() > 2.5 * states.std()).flatten(0, -2).any(dim=0)
    scale = states.abs().amax(dim=-1, keepdim=True) / 15
    return torch.nn.functional.linear(torch.where(exact, states, (states / scale).round() * scale), module.weight)


def scale_rows(module: torch.nn.Linear, args: Any, output: Tensor) -> Tensor:
    scale = args[0].abs().amax(dim=-1, keepdim=True) / 127
    return torch.nn.functional.linear((args[0] / scale).round() * scale, module.weight)


def make_quantised(quantise: Any, dtype: torch.dtype) -> PreTrainedModel:
    model = tiny("llama", dtype=dtype)
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(quantise)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("couple", [couple_rows, couple_columns])
def test_row_coupled_quantisation_is_refused(couple: Any, dtype: torch.dtype) -> None:
    """By its name, even where a small tree's logits are wrong because of it."""
    with pytest.raises(ValueError, match="llama is row-coupled"):
        Target(make_quantised(couple, dtype))


def test_quantisation_of_each_row_is_not_row_coupled() -> None:
    Target(make_quantised(scale_rows, torch.float32))


class Linear8bitLt(torch.nn.Linear):
    """As bitsandbytes names a layer of LLM.int8."""


class PerTensor:
    """As torchao names one scale for all."""


def make_named(settings: Any) -> torch.nn.Linear:
    """A layer that quantizes its inputs as its attributes say."""
    layer = torch.nn.Linear(48, 32, bias=False).eval()
    for name, value in settings.items():
        setattr(layer.weight if name.startswith("act_") else layer, name, value)
    return layer


def scheme(**inputs: Any) -> dict[str, Any]:
    return {"quantization_scheme": SimpleNamespace(input_activations=SimpleNamespace(**inputs))}


COUPLED: list[dict[str, Any]] = [
    scheme(dynamic=True, strategy="tensor"),
    {"act_quant_kwargs": SimpleNamespace(granularity=PerTensor())},
    {"act_quant_kwargs": SimpleNamespace(use_dynamic_per_tensor_scale=True)},
]
UNCOUPLED: list[dict[str, Any]] = [
    scheme(dynamic=True, strategy="token"),
    scheme(dynamic=False, strategy="tensor"),
    {"act_quant_kwargs": SimpleNamespace(granularity=PerTensor()), "act_quant_scale": torch.ones(1)},
    {"act_quant_kwargs": SimpleNamespace(granularity=None)},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_that_couple_rows_are_refused_by_name(dtype: torch.dtype) -> None:
    """Also where the self-test would see nothing."""
    model = tiny("llama", dtype=dtype)
    for layer, fault in [
        (Linear8bitLt(48, 32).eval(), "is a layer of LLM.int8, .* load the model in NF4 or unquantized"),
        *((make_named(settings), "quantizes its inputs with one scale for all tokens") for settings in COUPLED),
    ]:
        model.model.layers[1].mlp.down_proj = layer
        with pytest.raises(ValueError, match=f"llama is row-coupled: model.layers.1.mlp.down_proj {fault}"):
            Target(model)


@pytest.mark.parametrize("settings", UNCOUPLED)
def test_quantized_inputs_may_round_as_half_precision_does(settings: dict[str, Any]) -> None:
    """A difference in the last bit of float32 may change an integer."""
    model = tiny("llama", dtype=torch.float32)
    assert self_test.find_tolerance(as_target(model)) == 5e-3
    model.model.layers[1].mlp.down_proj = make_named(settings)
    rounded = 18 * torch.finfo(torch.bfloat16).eps * 2**0.5
    assert self_test.find_tolerance(as_target(model)) == pytest.approx(rounded)
    Target(model)


def as_target(model: PreTrainedModel) -> Any:
    """What the tolerance depends on."""
    return SimpleNamespace(model=model, dtype=model.dtype, config=model.config)


LONG = 100  # tokens of a window that the self-test tries with a made-up text
LONG_WINDOWS: dict[str, dict[str, int]] = {
    "llama4_text": {"attention_chunk_size": LONG},
    **{kind: {"sliding_window": LONG} for kind in ("mistral window", "gemma2", "gemma3_text", "gemma3_text eager")},
    **{kind: {"sliding_window": LONG} for kind in ("gemma3n_text", "gpt_oss", "phi3 window", "cohere2", "olmo3")},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", LONG_WINDOWS)
def test_a_long_window_that_is_off_by_one_is_refused(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(kind, dtype=dtype, **LONG_WINDOWS[kind])
    Target(model)
    for change in (-1, 1):

        def misread(model: Any, change: int = change) -> dict[str, AttentionWindow]:
            return {
                name: AttentionWindow(span.window and span.window + change, span.chunk and span.chunk + change)
                for name, span in attention_windows(model).items()
            }

        monkeypatch.setattr(facts, "attention_windows", misread)
        with pytest.raises(ValueError, match="fails the tree self-test"):
            Target(model)
        monkeypatch.undo()


def test_a_long_window_is_not_refused_for_rounding() -> None:
    """Large weights in many layers amplify bfloat16's rounding, as in real models."""
    model = tiny("mistral window", dtype=torch.bfloat16, sliding_window=LONG, num_hidden_layers=48)
    for name, parameter in model.named_parameters():
        if name.split(".")[-2] in ("q_proj", "o_proj", "down_proj"):
            parameter.data *= 4
    Target(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layers", [2, 8])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mixtral", "gpt2"])
def test_the_tolerance_of_half_precision_follows_from_rounding(kind: str, layers: int, dtype: torch.dtype) -> None:
    """It grows with the root of the layers. One pass's own rounding is not far below it."""
    settings = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    target = Target(tiny(kind, dtype=dtype, **settings))
    allowed, error = self_test.find_tolerance(target), self_test.self_test(target)
    assert allowed == pytest.approx(18 * torch.finfo(dtype).eps * layers**0.5)
    assert error < allowed < 0.4  # on some CPUs two passes round the same, and the error is 0
    ids = torch.arange(3, 19)[None]
    rounded = target.model(ids).logits.double()
    exact = target.model.double()(ids).logits
    assert allowed / 60 < (rounded - exact).abs().max() / exact.std()


def test_the_tolerance_stays_below_what_wrong_masks_give() -> None:
    model = tiny("llama", dtype=torch.bfloat16, hidden_size=16, num_hidden_layers=40)
    assert self_test.find_tolerance(as_target(model)) == 0.4


@pytest.mark.parametrize(("dtype", "loads"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_text_that_amplifies_half_precision_is_followed_by_others(
    dtype: torch.dtype, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In full precision the first text decides."""
    allowed, measure = self_test.find_tolerance, self_test._measure_errors
    texts: list[int] = []

    def amplify(target: Any, nodes: Any, layer: int | None = None, text: int = 0) -> tuple[float, float]:
        texts.append(text)
        error, coupling = measure(target, nodes, layer, text)
        return (error if text == 2 else 1.1 * allowed(target)), coupling

    monkeypatch.setattr(self_test, "_measure_errors", amplify)
    with nullcontext() if loads else pytest.raises(ValueError, match="fails the tree self-test"):
        Target(tiny("llama", dtype=dtype))
    assert texts == ([0, 1, 2] if loads else [0, 0])  # the second finds out whether rows are coupled


OTHER = {"llama": "full_attention", "gemma3_text": "sliding_attention", "qwen3_5_text": "linear_attention"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", OTHER)
def test_a_model_that_rounds_more_than_usual_is_judged_by_its_first_layers(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong masks, also those of another type of layer, are still found there."""
    model = tiny(kind, dtype=dtype, num_hidden_layers=8, layer_types=[OTHER[kind], "full_attention"] * 4)
    allowed = self_test.find_tolerance
    monkeypatch.setattr(self_test, "find_tolerance", lambda target, layers=0: layers and allowed(target, layers))
    Target(model)

    def spoil(*args: Any) -> Any:
        masks = tree_masks(*args)
        if isinstance(masks, dict):
            return masks["full_attention"]
        return torch.zeros_like(masks)

    monkeypatch.setattr("decode.session.tree_masks", spoil)
    with pytest.raises(ValueError, match=f"{kind} (fails the (tree )?self-test|is row-coupled)"):
        Target(model)


def test_another_thread_may_run_the_model_during_the_self_test() -> None:
    model, ended = tiny("mistral window", sliding_window=100), threading.Event()

    def run() -> None:
        while not ended.is_set():
            model(torch.tensor([[5, 6, 7]]))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(4):
            Target(model)
    finally:
        ended.set()
        thread.join()
