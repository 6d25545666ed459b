"""`speculate` tests a model once, notices its changes, and does not change it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

import decode.target
from decode import Target, speculate
from proposers import NGramProposer
from tests.support.models import tiny
from tests.support.speculating import BATCH, MASK, NEW, PROMPT, generate


def test_a_model_is_tested_once_or_after_a_change_and_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = []
    monkeypatch.setattr(decode.target, "self_test", lambda target: tested.append(target) or 0.0)
    for accelerate in ("off", "auto"):
        model = tiny("llama", dtype=torch.float32)
        for _ in range(3):
            generate(model, accelerate=accelerate, max_new_tokens=2)
        assert len(tested) == 1
        model.double()
        generate(model)
        model.set_attn_implementation("eager")
        generate(model)
        assert len(tested) == 3
        tested.clear()
        forgotten = weakref.ref(model)
        del model
        gc.collect()
        assert forgotten() is None


def test_other_sizes_and_windows_are_noticed() -> None:
    model = tiny("mistral", dtype=torch.float64)
    generate(model)
    model.config.sliding_window = 2
    expected = model.generate(PROMPT, max_new_tokens=NEW)
    assert generate(model).tolist() == expected.tolist()
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    model.eval()
    assert generate(model, torch.tensor([[model.config.vocab_size - 1]])).shape[1] > 1


def test_a_packed_copy_follows_the_weights() -> None:
    model = tiny("llama", dtype=torch.float32)
    for _ in range(2):
        assert generate(model, accelerate="auto").tolist() == generate(model).tolist()
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.neg_()
    model.model.layers[0].mlp.down_proj.weight.data += 1  # as merging adapters does, without a new version
    assert generate(model, accelerate="auto").tolist() == generate(model).tolist()
    model.model.norm.weight = torch.nn.Parameter(torch.randn_like(model.model.norm.weight))
    assert generate(model, accelerate="auto").tolist() == generate(model).tolist()


@pytest.mark.parametrize("accelerate", ["off", "auto"])
def test_the_model_is_left_as_it_was(accelerate: str) -> None:
    model = tiny("llama", dtype=torch.float32)

    def snapshot() -> tuple:
        modules = [
            (type(each), each.training, sorted(vars(each)), len(each._forward_hooks)) for each in model.modules()
        ]
        weights = [(name, weight.data_ptr(), weight.sum().item()) for name, weight in model.state_dict().items()]
        return modules, weights, model.config.to_dict(), model.config._attn_implementation

    before = snapshot()
    generate(model, BATCH, NGramProposer(), attention_mask=MASK, do_sample=True, accelerate=accelerate)
    assert snapshot() == before


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_inputs_that_peft_changes_from_outside_are_refused() -> None:
    given = {"input_ids": PROMPT, "max_new_tokens": NEW, "custom_generate": speculate}
    learned = get_peft_model(
        tiny("llama", dtype=torch.float64), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    with pytest.raises(ValueError, match="was replaced, as by a prompt-learning adapter of peft"):
        learned.eval().generate(**given)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(tiny("llama", dtype=torch.float64), lora, adapter_name="a")
    model.add_adapter("b", lora)
    model = model.eval().double()
    expected = model.generate(input_ids=PROMPT, max_new_tokens=NEW).tolist()
    for accelerate in ("off", "packed"):
        assert model.generate(**given, accelerate=accelerate).tolist() == expected
        with pytest.raises(ValueError, match=r"cannot honour adapter_names; .*Engine.add"):
            model.generate(**given, accelerate=accelerate, adapter_names=["b"])
        assert model.generate(**given, accelerate=accelerate).tolist() == expected
        assert model.generate(input_ids=PROMPT, max_new_tokens=NEW).tolist() == expected


def test_a_replaced_method_is_refused() -> None:
    model = tiny("llama", dtype=torch.float64)
    model.prepare_inputs_for_generation = lambda *args, **kwargs: {}
    with pytest.raises(ValueError, match="prepare_inputs_for_generation of this model was replaced"):
        generate(model)


@pytest.mark.parametrize("accelerate", ["off", "packed"])
def test_autocast_refuses_no_model(accelerate: str) -> None:
    """Whether its first call is within it or not."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = generate(tiny("llama", dtype=torch.float32), accelerate=accelerate)
        known = tiny("llama", dtype=torch.float32)
        with torch.autocast("cpu", enabled=False):
            generate(known, accelerate=accelerate)
        assert generate(known, accelerate=accelerate).tolist() == first.tolist()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("accelerate", ["off", "packed"])
def test_autocast_refuses_no_change(accelerate: str) -> None:
    """Copies are made anew, and an adapter is chosen."""
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny("llama", dtype=torch.float32), lora, adapter_name="a").eval()
    target = Target(model, accelerate=accelerate)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        head = model.get_base_model().lm_head
        head.weight = torch.nn.Parameter(head.weight.detach() * 2, requires_grad=False)
        target.weights_changed()
        assert target.adapt("a").fault is None
    (answer,) = decode.generate(target, PROMPT.tolist(), max_new_tokens=NEW, stop_ids=[])
    assert answer.tokens == model.generate(input_ids=PROMPT, max_new_tokens=NEW)[0, PROMPT.shape[1] :].tolist()
