"""Adapters by request: one target for each adapter of a peft model, which shares the weights of the others."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any
from weakref import ref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from decode import Engine, Target, generate, stream
from decode.models.stock_model import StandIn
from decode.requests.answer import Answer
from proposers import EagleProposer, NGramProposer
from tests.support.drafting import make_head
from tests.support.models import tiny

PROMPT = [(7 * place) % 90 + 3 for place in range(24)]
SETTINGS: dict[str, Any] = {"max_new_tokens": 10, "stop_ids": []}
MODES = [("off", torch.float64), ("packed", torch.float32), ("auto", torch.float32)]


def make_adapted(dtype: torch.dtype, seed: int = 0) -> Any:
    """A model with the adapters a, b (with an output layer of its own) and c (in other layers). a is active."""
    model = tiny("llama", dtype=dtype, seed=seed)
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 16, "init_lora_weights": False}
    layers = ["q_proj", "v_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(target_modules=layers, **settings), adapter_name="a")
    adapted.add_adapter("b", LoraConfig(target_modules=layers, modules_to_save=["lm_head"], **settings))
    adapted.add_adapter("c", LoraConfig(target_modules=["o_proj", "down_proj"], use_rslora=True, **settings))
    with torch.no_grad():
        adapted.base_model.model.lm_head.modules_to_save["b"].weight.mul_(-1)
    return adapted.to(dtype).eval()


def tell_text(target: Target, proposer: Any = None) -> list[int]:
    return generate(target, PROMPT, proposer, **SETTINGS)[0].tokens


def tell_expected(adapted: Any, name: str) -> list[int]:
    """The text of a copy in which peft has chosen the adapter."""
    copied = deepcopy(adapted)
    copied.set_adapter(name)
    return tell_text(Target(copied.eval()))


def read_answer(request: Any) -> Answer:
    assert request.answer is not None
    return request.answer


@pytest.mark.parametrize(("mode", "dtype"), MODES)
def test_each_adapter_has_the_text_that_peft_gives_it(mode: str, dtype: torch.dtype) -> None:
    adapted = make_adapted(dtype)
    before = [(name, id(each), each.requires_grad) for name, each in adapted.named_parameters()]
    target = Target(adapted, accelerate=mode)
    expected = {name: tell_expected(adapted, name) for name in "abc"}
    assert len({*map(tuple, expected.values())}) == 3
    assert {name: tell_text(target.adapt(name), NGramProposer()) for name in "abc"} == expected
    assert tell_text(target) == expected["a"] and target.adapt("b").adapt("c") is target.adapt("c")
    adapted.base_model.disable_adapter_layers()
    target.weights_changed()
    assert tell_text(target) not in expected.values()
    assert {name: tell_text(target.adapt(name)) for name in "abc"} == expected
    adapted.base_model.enable_adapter_layers()
    assert before == [(name, id(each), each.requires_grad) for name, each in adapted.named_parameters()]


def test_dora_is_selected_too() -> None:
    model = tiny("llama", dtype=torch.float64)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["up_proj"], use_dora=True, init_lora_weights=False)
    adapted = get_peft_model(model, config, adapter_name="a").double()
    adapted.add_adapter("b", LoraConfig(r=8, target_modules=["up_proj"], use_dora=True, init_lora_weights=False))
    adapted = adapted.double().eval()
    target = Target(adapted)
    assert {name: tell_text(target.adapt(name)) for name in "ab"} == {
        name: tell_expected(adapted, name) for name in "ab"
    }


@pytest.mark.parametrize(("mode", "dtype"), MODES[:2])
@pytest.mark.parametrize("proposer", ["ngram", None, "function"])
def test_rows_of_an_adapter_share_passes_and_adapters_take_turns(
    mode: str, dtype: torch.dtype, proposer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = make_adapted(dtype)
    target = Target(adapted, accelerate=mode)
    if proposer == "function":
        proposer = lambda target: EagleProposer(make_head("eagle", target), depth=2, nodes=5)  # noqa: E731
    engine = Engine(target, proposer)
    names = [None, "a", "b", "b", "c", "b"]
    requests = [engine.add(PROMPT[place:], adapter=name, **SETTINGS) for place, name in enumerate(names)]
    steps = list[set[int]]()
    while engine.is_busy:
        steps.append({chunk.request_id for chunk in engine.step()})
    groups = [{0}, {1}, {2, 3, 5}, {4}]
    assert all(any(step <= group for group in groups) for step in steps) and {2, 3, 5} in steps
    assert steps[:4] == groups  # in turns
    for place, (name, request) in enumerate(zip(names, requests, strict=True)):
        alone = target if name is None else target.adapt(name)
        assert read_answer(request).tokens == generate(alone, PROMPT[place:], None, **SETTINGS)[0].tokens
    assert engine.running == engine.waiting == 0


def test_texts_are_kept_for_their_adapter_alone() -> None:
    engine = Engine(Target(make_adapted(torch.float64)), None)
    found = [[*engine.add(PROMPT, adapter=name, **SETTINGS)][-1].answer for name in ("a", "b", "b", "a")]
    assert [answer.stats.reused > 15 for answer in found if answer] == [False, False, True, True]


def test_what_cannot_be_answered_with_an_adapter_is_refused() -> None:
    adapted = make_adapted(torch.float64)
    engine = Engine(Target(adapted), NGramProposer())
    with pytest.raises(ValueError, match=r"no adapter 'x'; it has a, b, c"):
        engine.add(PROMPT, adapter="x")
    with pytest.raises(ValueError, match=r"a NGramProposer cannot draft for several adapters; give the engine a name"):
        engine.add(PROMPT, adapter="a")
    with pytest.raises(ValueError, match=r"the model has no adapter 'a'$"):
        Engine(Target(tiny("llama")), None).add(PROMPT, adapter="a")
    with pytest.raises(TypeError, match=r"adapter is \['a'\]; it is the name of an adapter, or None"):
        engine.add(PROMPT, adapter=["a"])
    activated = LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5])
    with pytest.raises(ValueError, match=r"an adapter of activated LoRA, which only peft's own forward can turn on"):
        Target(get_peft_model(tiny("llama"), activated).eval())
    model = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"])).eval()
    late = Target(model)
    model.add_adapter("late", activated)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"an adapter of activated LoRA"):
            tell_text(late)
    adapted.merge_adapter(["a"])
    with pytest.raises(ValueError, match=r"merged into the weights; call unmerge_adapter\(\) first"):
        Target(adapted).adapt("b")


@pytest.mark.parametrize(("mode", "dtype"), MODES[:2])
def test_an_adapter_that_is_gone_ends_its_own_requests_alone(mode: str, dtype: torch.dtype) -> None:
    adapted = make_adapted(dtype)
    target = Target(adapted, accelerate=mode)
    held, engine, longer = target.adapt("b"), Engine(target, "ngram"), SETTINGS | {"max_new_tokens": 30}
    first, second = (engine.add(PROMPT, adapter=name, follow_weights=True, **longer) for name in "ab")
    engine.step()
    engine.step()
    adapted.delete_adapter("b")
    target.weights_changed()
    list(engine)
    assert second.finish == "error" and "no adapter 'b'; it has a, c" in str(read_answer(second).error)
    assert read_answer(first).tokens == generate(target.adapt("a"), PROMPT, None, **longer)[0].tokens
    for call in (lambda: engine.add(PROMPT, adapter="b"), lambda: tell_text(held), lambda: target.adapt("b")):
        with pytest.raises(ValueError, match=r"no adapter 'b'; it has a, c"):
            call()
    config = LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False)
    adapted.add_adapter("b", config)
    adapted.to(dtype).eval()
    target.weights_changed()
    assert tell_text(held) == tell_text(target.adapt("b")) == tell_expected(adapted, "b")


@pytest.mark.parametrize(("mode", "dtype"), MODES[:2])
def test_an_adapter_follows_its_weights(mode: str, dtype: torch.dtype) -> None:
    """Those of the adapter, and those of the base model, which are packed for all adapters at once."""
    adapted = make_adapted(dtype)
    target = Target(adapted, accelerate=mode)
    held = target.adapt("c")
    layer = adapted.base_model.model.model.layers[0]
    tensors: list[Tensor] = [layer.self_attn.o_proj.lora_B["c"].weight, layer.mlp.up_proj.weight]
    for tensor in tensors:
        before = tell_text(held)
        torch.nn.init.normal_(tensor, std=0.5)
        held.weights_changed()
        assert before != tell_text(held) == tell_expected(adapted, "c")
    layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight.detach().flip(0))
    target.weights_changed()
    assert tell_text(held) == tell_expected(adapted, "c")


def test_each_adapter_has_its_own_head() -> None:
    target = Target(make_adapted(torch.float64))
    heads = {name: make_head("eagle", target) for name in ("a", "b")}
    made = list[str | None]()

    def make(target: Target) -> EagleProposer:
        made.append(target.adapter)
        return EagleProposer(heads[target.adapter or "a"], depth=2, nodes=5)

    engine = Engine(target, make)
    requests = [engine.add(PROMPT, adapter=name, **SETTINGS) for name in (None, "b", "a", "b")]
    list(engine)
    assert made == [None, "b", "a"] and all(read_answer(each).error is None for each in requests)
    assert [*stream(target, PROMPT, make, **SETTINGS)][-1].answer is not None and made[3:] == [None]


def test_an_answer_goes_on_under_new_weights_if_it_says_so() -> None:
    """It reads its text so far with them; what it keeps apart, a limit or a stop string, goes on."""
    model = tiny("llama", dtype=torch.float64)
    engine = Engine(Target(model), "ngram", rows=2)
    going = engine.add(PROMPT, follow_weights=True, log_probs=0, **SETTINGS)
    ending, waiting = engine.add(PROMPT[1:], **SETTINGS), engine.add(PROMPT[2:], **SETTINGS)
    engine.step()
    engine.step()
    count = len(going.sequence) - len(PROMPT)
    assert 1 < count < 10
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.neg_()
    list(engine)
    answer, text = read_answer(going), PROMPT + going.sequence[len(PROMPT) :][:count]
    rest = generate(Target(model), text, None, max_new_tokens=10 - count, stop_ids=[], log_probs=0)[0]
    assert answer.tokens[count:] == rest.tokens and len(answer.tokens) == len(answer.log_probs) == 10
    assert [each.chosen for each in answer.log_probs[count:]] == pytest.approx([each.chosen for each in rest.log_probs])
    assert "ask again" in str(read_answer(ending).error) and read_answer(waiting).finish == "length"
    with pytest.raises(TypeError, match="follow_weights is 1; it is True or False"):
        engine.add(PROMPT, follow_weights=1)


def test_without_copies_adapters_follow_the_model_by_themselves() -> None:
    adapted = make_adapted(torch.float64)
    engine, longer = Engine(Target(adapted), "ngram"), SETTINGS | {"max_new_tokens": 20}
    requests = [engine.add(PROMPT, adapter=name, follow_weights=True, **longer) for name in (None, "a")]
    for _ in range(4):
        engine.step()
    adapted.set_adapter("b")
    list(engine)
    assert [each.finish for each in requests] == ["length", "length"]
    target = Target(adapted)
    adapted.set_adapter("c")
    assert tell_text(target) == tell_text(target.adapt("c")) == tell_expected(adapted, "c")


def test_an_adapter_may_be_named_first_while_another_thread_decodes() -> None:
    engine = Engine(Target(make_adapted(torch.float64)), "ngram")
    first = engine.add(PROMPT, **SETTINGS | {"max_new_tokens": 200})
    with ThreadPoolExecutor(1) as pool:
        driving = pool.submit(list, engine)
        others = [engine.add(PROMPT, adapter=name, **SETTINGS) for name in "abc"]
        driving.result()
    list(engine)
    assert [read_answer(each).finish for each in (first, *others)] == ["length"] * 4


def test_what_an_adapter_had_is_freed_with_it() -> None:
    adapted = make_adapted(torch.float64)
    target = Target(adapted)
    engine = Engine(target, None)
    for name in "ab":
        list(engine.add(PROMPT, adapter=name, **SETTINGS))
    weight = ref(adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_A["b"].weight)
    late = engine._find_scheduler("b")  # as another thread may have found it
    adapted.delete_adapter("b")
    list(engine.add(PROMPT, adapter="c", **SETTINGS))
    with pytest.raises(ValueError, match="no longer has the adapter 'b'"):
        engine.submit([], late)
    del late
    gc.collect()
    assert weight() is None and engine.running == 0
    held, gone = ref(target), ref(target.adapt("a"))
    engine.close()
    del target, engine
    gc.disable()
    try:
        gc.collect()
        target = Target(adapted)
        held = ref(target)
        target.adapt("a")
        del target
        assert held() is None and gone() is None  # without a cycle
    finally:
        gc.enable()


def test_copies_of_a_target_with_compiled_layers_leave_them_there() -> None:
    class Kernel(StandIn):
        def __init__(self, layer: nn.Module) -> None:
            self.layer = ref(layer)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            layer: Any = self.layer()
            return type(layer).forward(layer, *args, **kwargs)

    adapted = make_adapted(torch.float64)
    target, expected = Target(adapted), tell_expected(adapted, "b")
    layers = [module for module in target.model.modules() if type(module).__name__ == "LlamaDecoderLayer"]
    for layer in layers:
        layer.forward = Kernel(layer)  # type: ignore[assignment]
    assert tell_text(target.adapt("b")) == expected
    assert all("forward" not in vars(module) for module in target.adapt("b").model.modules())
    Target(target.model)
    assert all(isinstance(layer.forward, Kernel) for layer in layers)


def test_a_text_of_earlier_weights_is_not_kept_after_another_adapter_has_seen_the_change() -> None:
    adapted = make_adapted(torch.float64)
    target = Target(adapted)
    engine, longer = Engine(target, None), SETTINGS | {"max_new_tokens": 20}
    first, second = (engine.add(PROMPT, adapter=name, **longer) for name in ("a", "b"))
    for _ in range(4):
        engine.step()
    with torch.no_grad():
        adapted.base_model.model.model.layers[0].mlp.up_proj.weight.neg_()
    engine.step()  # of a, which ends its request
    assert first.finish == "error" and second.finish is None
    engine.cancel(second)
    again = [engine.add(PROMPT, adapter=name, **SETTINGS) for name in "ab"]
    list(engine)
    assert [read_answer(each).tokens for each in again] == [tell_expected(adapted, name) for name in "ab"]
