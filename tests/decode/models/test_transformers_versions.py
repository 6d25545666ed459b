"""What differs between versions of transformers: names, new arguments and warnings.

Shapes: B rows, N tokens.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LlamaForCausalLM, PreTrainedModel

from decode import Target, generate
from decode.models.compatibility import find_cache_name
from proposers import DraftProposer, NGramProposer
from tests.support import speculating
from tests.support.models import CACHE, tiny
from tests.support.speculating import BATCH, MASK, PROMPT


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny("llama")


def with_argument(name: str, default: Any = None, is_cache: bool = False) -> Callable[..., Any]:
    """Llama's forward pass with another argument, which does nothing or is the KV cache under a new name."""
    stock = LlamaForCausalLM.forward

    @functools.wraps(stock)
    def forward(self: PreTrainedModel, *args: Any, **inputs: Any) -> Any:
        value = inputs.pop(name, None)
        return stock(self, *args, **inputs, **({CACHE: value} if is_cache else {}))

    parameters = [
        each for each in inspect.signature(stock).parameters.values() if not (is_cache and each.name == CACHE)
    ]
    parameters.insert(-1, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_forward_says_what_it_calls_the_cache(
    model: PreTrainedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5, 9, 5, 9, 5]]
    expected = generate(Target(model), prompts, None, max_new_tokens=8)[0].tokens
    forward = with_argument(name, is_cache=True)
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    assert find_cache_name(forward) == name
    assert generate(Target(model), prompts, NGramProposer(), max_new_tokens=8)[0].tokens == expected


def test_a_cache_by_an_unknown_name_is_refused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "forward", with_argument("memory", is_cache=True))
    with pytest.raises(ValueError, match=r"no KV cache by a name that is known \(cache, past_key_values\)"):
        Target(model)


# A new input of the model: its default in the forward, the config's value, what is passed, and whether it is taken.
INPUTS: dict[str, tuple[Any, Any, Any, bool]] = {
    "none": (..., None, None, True),
    "an empty cache": (None, None, DynamicCache(), True),
    "the forward's default": (0.5, None, 0.5, True),
    "the config's value": (None, "fast", "fast", True),
    "another value": (0.5, "fast", 0.25, False),
    "a tensor": (None, None, torch.zeros(1, 7), False),
    "a filled cache": (None, None, DynamicCache([(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))]), False),
}


def check(model: PreTrainedModel, name: str, is_taken: bool, settings: dict[str, Any], expected: Tensor) -> None:
    """The settings change nothing, or are refused by this name."""
    if is_taken:
        assert torch.equal(speculating.generate(model, **settings), expected)
    else:
        with pytest.raises(ValueError, match=f"cannot honour {name};"):
            speculating.generate(model, **settings)


@pytest.mark.parametrize("case", INPUTS)
def test_a_new_input_is_refused_if_it_carries_something(
    model: PreTrainedModel, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, configured, value, is_taken = INPUTS[case]
    expected = speculating.generate(model)
    monkeypatch.setattr(LlamaForCausalLM, "forward", with_argument("new_input", default))
    if configured is not None:
        model.config.new_input = configured
    check(model, "new_input", is_taken, {"new_input": value}, expected)


@pytest.mark.parametrize(("value", "is_taken"), [(None, True), (3, True), (4, False)])
def test_a_new_setting_is_refused_if_it_asks_for_something(
    model: PreTrainedModel, value: Any, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = GenerationConfig.__init__

    def begin(self: GenerationConfig, *args: Any, new_setting: int | None = 3, **settings: Any) -> None:
        stock(self, *args, **settings)
        self.new_setting = new_setting

    monkeypatch.setattr(GenerationConfig, "__init__", begin)
    expected = speculating.generate(model)
    config = GenerationConfig(max_new_tokens=speculating.NEW, new_setting=value)
    check(model, "new_setting=4", is_taken, {"generation_config": config}, expected)


@pytest.mark.parametrize(("settings", "is_taken"), [({}, True), ({"new_way": None}, True), ({"new_way": 2}, False)])
def test_a_new_argument_of_generate_is_refused_if_it_asks_for_something(
    model: PreTrainedModel, settings: dict[str, Any], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = inspect.getsource(inspect.unwrap(GenerationMixin.generate))
    begin = source.index("    def generate(")
    source = "if True:\n" + source[begin:].replace(
        "        **kwargs,\n    )", "        new_way=1,\n        **kwargs,\n    )", 1
    )
    names = dict(vars(transformers.generation.utils))
    exec(compile(source, "generate", "exec"), names)
    expected = speculating.generate(model)
    monkeypatch.setattr(GenerationMixin, "generate", torch.no_grad()(names["generate"]))
    check(model, "new_way", is_taken, settings, expected)


def test_nothing_warns(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a Python warning nor one of transformers' own, which each process sees once."""
    transformers.utils.logging.enable_propagation()
    for each in list(logging.root.manager.loggerDict):
        warn = getattr(logging.getLogger(each), "warning_once", None)
        if each.startswith("transformers") and hasattr(warn, "cache_clear"):
            warn.cache_clear()
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings(), caplog.at_level(logging.WARNING, logger="transformers"):
            warnings.simplefilter("error")
            target = Target(model)
            generate(target, [[5, 9, 5, 9, 5]], DraftProposer(target, depth=2, nodes=3), max_new_tokens=6)
            settings = {"return_dict_in_generate": True, "output_hidden_states": True, "output_scores": True}
            result = speculating.generate(model, BATCH, NGramProposer(), attention_mask=MASK, **settings)
            speculating.generate(model, result.sequences, attention_mask=None, **{CACHE: result[CACHE]})
            model.generation_config.cache_implementation = "static"
            speculating.generate(model, PROMPT, NGramProposer(), **settings)
    finally:
        transformers.utils.logging.disable_propagation()
    assert [record.getMessage() for record in caplog.records] == []
