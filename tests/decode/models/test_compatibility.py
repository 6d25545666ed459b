"""Models in a wrapper of torch.compile or peft, and what can be no target. Architectures: test_architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from decode import Target, generate
from proposers import NGramProposer
from tests.support.models import WINDOW, tiny

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 8]]


def adapt(model: PreTrainedModel) -> PeftModel:
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], lora_alpha=32, init_lora_weights=False)).eval()


def learn_prompts(model: PreTrainedModel) -> PeftModel:
    return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def answers(target: Target) -> list[list[int]]:
    return [answer.tokens for answer in generate(target, PROMPTS, NGramProposer(length=3), max_new_tokens=12)]


def test_a_model_of_torch_compile_decodes_as_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    compiled = torch.compile(model)
    monkeypatch.setattr(type(compiled), "__call__", lambda *args, **kwargs: pytest.fail("it was compiled"))
    target = Target(compiled)
    assert target.model is model and answers(target) == answers(Target(model))


@pytest.mark.parametrize("accelerate", ["off", "auto"])
def test_a_peft_model_decodes_with_its_adapters(accelerate: str) -> None:
    plain = answers(Target(tiny("llama", dtype=torch.float32)))
    wrapped = adapt(tiny("llama", dtype=torch.float32))
    expected = [
        wrapped.get_base_model().generate(torch.tensor([prompt]), max_new_tokens=12)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    assert answers(Target(torch.compile(wrapped), accelerate=accelerate)) == expected != plain
    assert isinstance(wrapped.get_base_model().model.layers[0].self_attn.q_proj.base_layer, nn.Linear)


def with_flash_attention() -> PreTrainedModel:
    model = tiny("llama")
    model.config._attn_implementation = "flash_attention_2"
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "prompt learning": (lambda: learn_prompts(tiny("llama")), "adds virtual tokens"),
    "a name": (lambda: "some/folder", r"call Target\.load\('some/folder'\)"),
    "another module": (lambda: nn.Linear(2, 2), "not a Linear"),
    "no language head": (lambda: tiny("llama").model, "LlamaModel is no decoder-only language model"),
    "no tree masks": (with_flash_attention, "'flash_attention_2' takes no tree mask"),
    "a window that is ignored": (
        lambda: tiny("llama", sliding_window=WINDOW),
        "llama has no windows, but its configuration has sliding_window=8; set",
    ),
    "different windows": (
        lambda: tiny("mistral", sliding_window=None, per_layer_config={0: {"sliding_window": WINDOW}}),
        "mistral has layers with different windows",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_be_no_target_is_refused_with_its_reason(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        Target(make())
