"""A model that changes under a living target: the text of a target made now, or an error with the call to make."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from functools import cache
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode import Engine, Target, generate, speculate, stream
from decode.request import Request
from decode.weights.layers import SAMPLES
from proposers import EagleProposer, NGramProposer
from tests.support.drafting import make_head
from tests.support.models import Adapter, tiny

PROMPT = [(7 * place) % 90 + 3 for place in range(24)]  # long enough to be kept
SETTINGS: dict[str, Any] = {"max_new_tokens": 8, "stop_ids": []}
RENEW = r"call target.weights_changed\(\) before the next step"
SENTENCE = rf"{RENEW}|make a new one: Target\(|call model.eval\(\) first|weights changed while this answer was decoded"
SENTENCE += r"|call unmerge_adapter\(\) first"


def layer(model: Any) -> Any:
    return model.model.layers[1]


def adapter(model: Any) -> Any:
    return model.model.layers[0].mlp.down_proj


@torch.no_grad()
def write(tensor: Tensor, change: Callable[[Tensor], Any]) -> None:
    change(tensor)


def replace(model: PreTrainedModel, name: str) -> None:
    place, _, last = name.rpartition(".")
    module = model.get_submodule(place)
    setattr(module, last, nn.Parameter(getattr(module, last).detach().flip(0)))


def load(model: PreTrainedModel, assign: bool) -> None:
    states = {
        name: tensor.flip(0) if "q_proj" in name else tensor.clone() for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(states, assign=assign)


def step_optimizer(model: PreTrainedModel) -> None:
    output = model.lm_head.weight
    output.grad = torch.ones_like(output).cumsum(0)
    torch.optim.AdamW([output], lr=0.5).step()
    output.grad = None


WAYS: dict[str, Callable[[Any], Any]] = {
    "a weight": lambda model: write(layer(model).mlp.up_proj.weight, Tensor.neg_),
    "an element": lambda model: write(layer(model).mlp.up_proj.weight, lambda weight: weight[3, 3].fill_(9.0)),
    "a bias": lambda model: write(layer(model).self_attn.v_proj.bias, lambda bias: bias.add_(1.0)),
    "a norm": lambda model: write(layer(model).input_layernorm.weight, lambda weight: weight[::2].neg_()),
    "embeddings": lambda model: write(model.model.embed_tokens.weight, lambda weight: weight.copy_(weight.roll(1, 0))),
    "an optimizer's step": step_optimizer,
    "another parameter": lambda model: replace(model, "model.layers.1.self_attn.o_proj.weight"),
    "another bias": lambda model: replace(model, "model.layers.1.self_attn.q_proj.bias"),
    "another norm": lambda model: replace(model, "model.norm.weight"),
    "other memory": lambda model: setattr(
        layer(model).mlp.gate_proj.weight, "data", torch.ones(48, 32).to(model.dtype)
    ),
    "through data": lambda model: layer(model).mlp.down_proj.weight.data.mul_(-1),
    "a state dict": lambda model: load(model, assign=False),
    "an assigned state dict": lambda model: load(model, assign=True),
    "another module": lambda model: setattr(layer(model), "mlp", deepcopy(model.model.layers[0].mlp)),
    "a layer less": lambda model: setattr(layer(model), "mlp", nn.Identity()),
    "adapters disabled": lambda model: setattr(
        adapter(model), "_disable_adapters", not adapter(model)._disable_adapters
    ),
    "an adapter switched": lambda model: setattr(adapter(model), "_active_adapter", ["b"]),
    "an adapter added": lambda model: adapter(model)._active_adapter.append("b"),
    "an adapter's scale": lambda model: adapter(model).scaling.update(a=-2.0),
    "an adapter's weight": lambda model: write(adapter(model).lora_A["a"].weight, Tensor.neg_),
    "a new adapter": lambda model: setattr(layer(model).mlp, "up_proj", Adapter(layer(model).mlp.up_proj)),
    "more tokens": lambda model: model.resize_token_embeddings(len(model.lm_head.weight) + 8, mean_resizing=False),
    "another dtype": lambda model: model.to(torch.float32 if model.dtype == torch.float64 else torch.float64),
    "training mode": lambda model: model.train(),
    "another attention": lambda model: model.set_attn_implementation("eager"),
}
LAST = "another module", "a layer less", "a new adapter"  # others need what they replace


def make_model(seed: int, dtype: torch.dtype) -> Any:
    model = tiny("qwen2", dtype=dtype, seed=seed)
    torch.manual_seed(seed)
    model.model.layers[0].mlp.down_proj = Adapter(model.model.layers[0].mlp.down_proj)
    return model


def make_fresh(model: Any, adapter: str | None = None) -> Target:
    """A target that is made now. The living one has the self-test."""
    with patch("decode.target.self_test", lambda target: 0.0):
        target = Target(model)
        return target if adapter is None else target.adapt(adapter)


def tell_text(model: PreTrainedModel) -> list[int]:
    """The text of a target that is made now, of a deep copy."""
    return generate(make_fresh(deepcopy(model).eval()), PROMPT, None, **SETTINGS)[0].tokens


class Living:
    """A target, and what decodes with it, that live on while the model changes."""

    def __init__(self, model: PreTrainedModel, mode: str, use: str) -> None:
        self.model, self.mode, self.use = model, mode, use
        self.target, self.engine = Target(model, accelerate=mode), None
        if use == "engine":
            self.engine = Engine(self.target, NGramProposer(length=3))

    def answer(self, change: Callable[[], Any] | None = None) -> list[int]:
        """The text after a change, which may come in the middle. Raises the error of a request."""
        if change is not None and self.use in ("speculate", "generate"):
            change()
        if self.use == "speculate":
            options = {"max_new_tokens": 8, "do_sample": False, "accelerate": self.mode, "eos_token_id": -1}
            found: Tensor = self.model.generate(torch.tensor([PROMPT]), custom_generate=speculate, **options)
            return found[0, len(PROMPT) :].tolist()
        if self.use == "generate":
            return generate(self.target, PROMPT, NGramProposer(length=3), **SETTINGS)[0].tokens
        if self.engine is not None:
            chunks = self.engine.add(PROMPT, **SETTINGS)
        else:
            chunks = stream(self.target, PROMPT, None, **SETTINGS)  # type: ignore[assignment]
        last = None
        for number, chunk in enumerate(chunks):
            if number == 1 and change is not None:
                change()
            last = chunk.answer
        assert last is not None
        if last.exception is not None:
            raise last.exception
        return last.tokens


def run_schedule(seed: int) -> tuple[int, int]:
    """Change a model in random ways. Returns how often the text was right, and how often an error told what to do."""
    choose = random.Random(seed)
    mode, use = choose.choice(["off", "packed", "auto"]), choose.choice(["generate", "stream", "engine", "speculate"])
    model = make_model(seed, torch.float64 if mode == "off" else torch.float32)
    living, right, told = Living(model, mode, use), 0, 0
    assert living.answer() == tell_text(model)
    for way in [*choose.sample([each for each in WAYS if each not in LAST], 3), choose.choice([*WAYS])]:
        # Through data is seen before prompts are read, and not in the middle of an answer.
        in_the_middle = use in ("stream", "engine") and way != "through data" and choose.random() < 0.5
        change: Any = lambda way=way: WAYS[way](model)  # noqa: E731
        if not in_the_middle:
            change()
        try:
            found = living.answer(change if in_the_middle else None)
        except ValueError as error:
            assert re.search(SENTENCE, str(error)), error
            told += 1
            model.eval()
            if re.search(RENEW, str(error)):
                living.target.weights_changed()
            elif use != "speculate":
                if living.engine is not None:
                    living.engine.close()
                living = Living(model, mode, use)
            found = living.answer()
        else:
            right += 1
        assert found == tell_text(model), (mode, use, way, in_the_middle)
        assert living.answer() == found
    return right, told


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_text_after_a_change_is_that_of_a_new_target_or_an_error_says_what_to_do(count: int) -> None:
    right, told = map(sum, zip(*map(run_schedule, range(count)), strict=True))
    assert right + told == 4 * count and right > count // 2 and told > count // 2


def add_peft(model: Any) -> Any:
    """Adapters of peft, a and b, in layers that no way of `WAYS` replaces."""
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 32, "init_lora_weights": False}
    adapted = get_peft_model(model, LoraConfig(target_modules=["k_proj"], **settings), adapter_name="a")
    adapted.add_adapter("b", LoraConfig(target_modules=["k_proj"], **settings))
    return adapted.to(model.dtype).eval()


PEFT_WAYS: dict[str, Callable[[Any], Any]] = {
    "peft: another adapter": lambda adapted: adapted.set_adapter("b"),
    "peft: disabled": lambda adapted: adapted.base_model.disable_adapter_layers(),
    "peft: merged": lambda adapted: adapted.merge_adapter(),
    "peft: trained": lambda adapted: [
        write(each, Tensor.neg_) for name, each in adapted.named_parameters() if "lora_B.b" in name
    ],
}


class Asked:
    """A request of a schedule, and the weights that each part of its answer was decoded with."""

    def __init__(self, adapter: str | None, request: Request) -> None:
        self.adapter, self.request = adapter, request
        self.parts = list[tuple[int, Any]]()  # from this token on, these weights

    def check(self, make_target: Callable[[Any, str | None], Target]) -> None:
        """Compare the answer with those of fresh engines on deep copies."""
        found = self.request.sequence[len(PROMPT) :]
        ends = [begin for begin, _ in self.parts[1:]] + [len(found)]
        for (begin, copied), end in zip(self.parts, ends, strict=True):
            if end > begin:
                settings = SETTINGS | {"max_new_tokens": end - begin}
                answer = generate(make_target(copied, self.adapter), PROMPT + found[:begin], None, **settings)[0]
                assert answer.tokens == found[begin:end]


def follow_change(adapted: Any, target: Target, call: Callable[[], Any]) -> bool:
    """Make a call after a change, and what its error says. Returns whether the target can follow."""
    try:
        call()
    except ValueError as error:
        assert re.search(SENTENCE, str(error)), error
        adapted.eval()
        if not re.search(rf"{RENEW}|model.eval", str(error)):
            return False
        try:
            target.weights_changed()
        except ValueError as form:
            assert "make a new one: Target(" in str(form)
            return False
    return True


def run_engine_schedule(seed: int) -> Counter[str]:
    """Ask, step, cancel and change in a random order. Returns how the requests ended."""
    choose = random.Random(seed)
    mode = choose.choice(["off", "packed", "auto"])
    adapted = add_peft(make_model(seed, torch.float64 if mode == "off" else torch.float32))
    model, asked = adapted.get_base_model(), list[Asked]()
    target = Target(adapted, accelerate=mode)
    engine = Engine(target, choose.choice(["ngram", None]), rows=2)
    weights = deepcopy(adapted)
    ways = WAYS | {name: lambda _, way=way: way(adapted) for name, way in PEFT_WAYS.items()}
    for event in choose.choices(["ask", "step", "cancel", "change"], [4, 6, 1, 2], k=16):
        running = [each for each in asked if each.request.answer is None]
        if event == "ask":
            adapter = choose.choice([None, None, "a", "b"])
            try:
                request = engine.add(PROMPT, adapter=adapter, follow_weights=choose.random() < 0.7, **SETTINGS)
            except ValueError as error:  # it cannot be answered as the model is now
                assert re.search(SENTENCE, str(error)), error
                continue
            asked.append(Asked(adapter, request))
            asked[-1].parts.append((0, weights))
        elif event == "step" and engine.is_busy:
            engine.step()
        elif event == "cancel" and running:
            engine.cancel(choose.choice(running).request)
        elif event == "change":
            name = choose.choice([each for each in ways if each not in LAST])
            try:
                ways[name](model)
            except (KeyError, ValueError):  # of peft, for an adapter that is merged already
                continue
            weights = deepcopy(adapted).eval()
            for each in running:
                each.parts.append((len(each.request.sequence) - len(PROMPT), weights))
            is_noticed = name != "through data" and choose.random() < 0.5  # by the next step
            if not follow_change(adapted, target, engine.step if is_noticed else target.weights_changed):
                break
    with suppress(ValueError):  # the model has another form
        list(engine)
    ends, make_target = Counter[str](), cache(make_fresh)
    for each in asked:
        answer = each.request.answer
        assert answer is not None
        assert answer.error is None or re.search(SENTENCE, answer.error), answer.error
        each.check(make_target)
        ends[
            answer.finish + ("" if len(each.parts) == 1 or answer.finish != "length" else " under several weights")
        ] += 1
    return ends


@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_answers_under_changing_weights_and_adapters_are_those_of_fresh_engines(count: int) -> None:
    ends = sum(map(run_engine_schedule, range(count)), Counter[str]())
    expected = {"length": count, "length under several weights": count // 10, "error": count // 10}
    assert all(ends[name] >= least for name, least in expected.items()) and ends["cancelled"], ends


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["off", "packed"])
def test_an_engine_does_not_go_on_with_what_earlier_weights_computed(way: str, mode: str) -> None:
    """Of the same prompt, which is kept."""
    model = make_model(1, torch.float64 if mode == "off" else torch.float32)
    target = Target(model, accelerate=mode)
    engine = Engine(target, None)
    before = [token for chunk in engine.add(PROMPT, **SETTINGS) for token in chunk.tokens]
    assert before == tell_text(model)
    again = engine.add(PROMPT, **SETTINGS)
    assert [token for chunk in again for token in chunk.tokens] == before and again.stats.reused > 15
    WAYS[way](model)
    try:
        request = engine.add(PROMPT, **SETTINGS)
        found = [token for chunk in request for token in chunk.tokens]
    except ValueError as error:
        assert mode == "packed" or way in ("more tokens", "another dtype", "training mode", "another attention"), error
        assert re.search(SENTENCE, str(error)), error
    else:
        assert mode == "off" and request.stats.reused == 0 and found == tell_text(model)


def test_two_engines_on_one_target_both_notice(target: Target) -> None:
    model = make_model(2, torch.float64)
    target = Target(model)
    engines = [Engine(target, None) for _ in range(2)]
    for engine in engines:
        [*engine.add(PROMPT, **SETTINGS)]
    WAYS["a norm"](model)
    for engine in engines:
        request = engine.add(PROMPT, **SETTINGS)
        assert [token for chunk in request for token in chunk.tokens] == tell_text(model) and not request.stats.reused


def test_requests_that_wait_are_answered_with_the_new_weights() -> None:
    model = make_model(3, torch.float64)
    engine = Engine(Target(model), None, rows=1)
    running, waiting = engine.add(PROMPT, **SETTINGS), engine.add(PROMPT, **SETTINGS)
    engine.step()
    WAYS["a bias"](model)
    engine.step()
    assert running.answer is not None and running.finish == "error" and "ask again" in (running.answer.error or "")
    assert [token for chunk in waiting for token in chunk.tokens] == tell_text(model)


def test_a_copy_that_failed_to_be_made_is_not_replaced_by_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    living = Living(make_model(6, torch.float32), "packed", "speculate")
    living.answer()
    WAYS["a weight"](living.model)
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr("decode.cpu.packed_linear._pack", Mock(side_effect=KeyboardInterrupt))
        living.answer()
    assert living.answer() == tell_text(living.model)


@pytest.mark.parametrize("way", ["a weight", "another parameter"])
def test_threads_that_generate_after_a_change_all_notice(way: str) -> None:
    living = Living(make_model(7, torch.float32), "packed", "speculate")
    living.answer()
    WAYS[way](living.model)
    with ThreadPoolExecutor(3) as pool:
        texts = [*pool.map(lambda _: living.answer(), range(3))]
    assert texts == [tell_text(living.model)] * 3
    assert living.answer() == texts[0]


@pytest.mark.parametrize("mode", ["off", "packed"])
def test_adapters_that_the_next_pass_would_unmerge_are_refused(mode: str) -> None:
    """peft's layers take a merged adapter out of the weights in the first pass in which they are disabled."""
    model = make_model(8, torch.float32)
    target = Target(model, accelerate=mode)
    adapter(model).merged_adapters, adapter(model)._disable_adapters = ["a"], True
    for call in (lambda: Target(model, accelerate=mode), lambda: generate(target, PROMPT, None, **SETTINGS)):
        with pytest.raises(ValueError, match=r"merged into the weights and disabled.*call unmerge_adapter\(\) first"):
            call()


def test_weights_of_every_dtype_are_compared_or_left_out() -> None:
    model = tiny("llama")
    layer(model).odd = nn.Parameter(torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), requires_grad=False)
    target = Target(model)
    assert target.read_version(deep=True) == 0
    WAYS["another norm"](model)
    assert target.read_version(deep=True) == 1


def test_resizing_is_no_training_mode() -> None:
    """A new matrix is in training mode, which changes nothing."""
    model = tiny("llama")
    model.resize_token_embeddings(104, mean_resizing=False)
    target = Target(model)
    assert target.vocabulary == 104 and generate(target, [103, 5], None, **SETTINGS)[0].error is None
    model.config.pad_token_id = 7  # nothing depends on it
    assert generate(target, [103, 5], None, **SETTINGS)[0].error is None
    model.resize_token_embeddings(112, mean_resizing=False)
    with pytest.raises(ValueError, match=r"vocab_size was 104, and is 112\); make a new one: Target\("):
        Engine(target, None).add([111])


def test_a_few_elements_through_data_are_seen_where_they_are_compared() -> None:
    target = Target(tiny("llama"))
    weight = target.model.lm_head.weight
    weight.data[0, 0] += 1
    assert target.read_version() == 0 and target.read_version(deep=True) == 1
    weight.data[0, 1 : weight.numel() // SAMPLES] += 1  # as the docstring says, it is not seen
    assert target.read_version(deep=True) == 1
    weight.data.mul_(2)
    assert target.read_version(deep=True) == 2


def test_a_head_follows_weights_in_place() -> None:
    model = make_model(5, torch.float64)
    target = Target(model)
    proposer = EagleProposer(make_head("eagle", target), depth=3, nodes=8)
    generate(target, PROMPT, proposer, **SETTINGS)
    WAYS["an optimizer's step"](model)
    assert generate(target, PROMPT, proposer, **SETTINGS)[0].tokens == tell_text(model)


@pytest.mark.parametrize("accelerate", ["off", "packed"])
def test_a_step_sees_a_module_alone_in_training_mode_or_with_a_part_that_it_had_not(accelerate: str) -> None:
    model = tiny("llama", dtype=torch.float32)
    target, leaf = Target(model, accelerate=accelerate), layer(model).mlp.act_fn
    before = target.read_version()
    leaf.train()
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        target.read_version()
    leaf.eval()
    assert target.read_version() == before
    leaf.add_module("part", nn.Identity())
    if accelerate == "off":
        assert target.read_version() == before + 1
    else:
        with pytest.raises(ValueError, match=RENEW):
            target.read_version()
        target.weights_changed()
        assert target.read_version() > before


@pytest.mark.parametrize("mode", ["packed", "auto"])
def test_packed_copies_follow_an_optimizer_in_place(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine answers as a new target does, after each of several steps. It is made anew once, for more memory."""
    model = make_model(9, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # these are packed in half the memory
    target = Target(model, accelerate=mode)
    engine, made, set_up = Engine(target, NGramProposer(length=3)), [], Target._set_up
    monkeypatch.setattr(Target, "_set_up", lambda *inputs: (made.append(inputs[0]), set_up(*inputs)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        target.weights_changed()
        request = engine.add(PROMPT, **SETTINGS)
        assert [token for chunk in request for token in chunk.tokens] == tell_text(model)
    assert made.count(target) == 1


def test_a_target_alone_has_nothing_to_renew_and_one_without_a_model_says_so() -> None:
    model = make_model(10, torch.float32)
    target = Target(deepcopy(model), accelerate="packed", in_place=True)
    WAYS["a norm"](target.model)
    target.weights_changed()  # the packed weights are the only ones, and the norm is used as it is
    WAYS["a norm"](model)
    assert generate(target, PROMPT, None, **SETTINGS)[0].tokens == tell_text(model)
    target = Target(model, accelerate="packed")
    del model
    with pytest.raises(ValueError, match=r"model of this target is gone; make a new one of another: Target\("):
        target.weights_changed()


def test_fingerprints_follow_the_weights() -> None:
    model = make_model(11, torch.float32)
    target = Target(model, accelerate="packed")
    before = target.weights_fingerprint
    step_optimizer(model)
    target.weights_changed()
    assert before != target.weights_fingerprint == Target(model).weights_fingerprint
    assert target.fingerprints == {"weights": target.weights_fingerprint}  # there is no tokenizer


def test_a_packed_head_takes_the_new_output_matrix_of_its_target_alone() -> None:
    model = make_model(12, torch.float32)
    target = Target(model, accelerate="packed")
    head = make_head("eagle", target, output="target").float()
    proposer = EagleProposer(head, depth=3, nodes=8).prepare(target)
    for _ in range(2):
        assert generate(target, PROMPT, proposer, **SETTINGS)[0].tokens == tell_text(model)
        assert torch.equal(proposer.head.borrowed, target.output_matrix)
        states = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
        expected = states @ target.output_matrix.T
        torch.testing.assert_close(proposer.head.outputs[0](states), expected, rtol=0.05, atol=0.05)
        step_optimizer(model)
        target.weights_changed()
    other = Target(make_model(13, torch.float32), accelerate="packed")
    with pytest.raises(ValueError, match="prepared for another target's output matrix; load it again"):
        generate(other, PROMPT, proposer, **SETTINGS)


def test_weights_that_a_target_failed_to_follow_are_followed_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(14, torch.float32)
    target = Target(model, accelerate="packed")
    packing, testing = "decode.cpu.packed_linear._pack", "decode.target.self_test"
    for place, way in ((packing, "a weight"), (packing, "another parameter"), (testing, "another norm")):
        WAYS[way](model)
        with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
            broken.setattr(place, Mock(side_effect=KeyboardInterrupt))
            target.weights_changed()
        target.weights_changed()
        assert generate(target, PROMPT, None, **SETTINGS)[0].tokens == tell_text(model)


def test_a_target_made_in_inference_mode_follows_outside_of_it() -> None:
    model = make_model(15, torch.float32)
    with torch.inference_mode():
        target = Target(model, accelerate="packed")
    step_optimizer(model)
    target.weights_changed()
    assert generate(target, PROMPT, None, **SETTINGS)[0].tokens == tell_text(model)


def test_a_column_that_is_written_through_data_is_seen() -> None:
    model = tiny("llama", dtype=torch.float32)
    target = Target(model, accelerate="packed")
    layer(model).mlp.up_proj.weight.data[:, 3] = 5
    target.weights_changed()
    assert generate(target, PROMPT, None, **SETTINGS)[0].tokens == tell_text(model)


def test_a_packed_model_with_other_tensors_is_to_be_loaded_again() -> None:
    target = Target(make_model(16, torch.float32), accelerate="packed", in_place=True)
    WAYS["another norm"](target.model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"other tensors or modules than before; load it again: Target.load"):
            target.weights_changed()


def test_steps_of_earlier_weights_are_not_taken_over() -> None:
    """A GPU's graphs read the tensors that they were captured with."""
    model = make_model(17, torch.float32)
    target = Target(model, accelerate="packed")
    session, steps = target.open(1), Mock()
    session.steps = steps
    WAYS["another norm"](model)
    target.weights_changed()
    session.close()
    assert target.idle_steps == []
    session = target.open(1)
    session.steps = steps
    session.close()
    assert target.idle_steps == [steps]
