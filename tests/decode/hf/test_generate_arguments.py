"""Every argument of transformers' `generate` does with `speculate` what docs/generate.md says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
)
from transformers.utils import ModelOutput

from decode import Target, speculate
from decode.hf.arguments import KNOWN_ARGUMENTS, KNOWN_SETTINGS
from proposers import DraftProposer
from tests.support.generate_arguments import CALL_ARGUMENTS, REFUSED, TRIALS, UNUSED
from tests.support.models import CACHE, tiny
from tests.support.speculating import BATCH, MASK, PROMPT, make_tokenizer

TWO = torch.cat([PROMPT, PROMPT.flip(1)])
ALIKE = ("disable_compile", "remove_invalid_values", "use_cache", "max_cache_len", "do_sample")  # other than in tokens


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("llama", attn_implementation="eager")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


def run(model: PreTrainedModel, settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase, ours: bool) -> Any:
    """The result of `generate` as nested lists and tensors."""
    settings = {"max_new_tokens": 9, "pad_token_id": 0, **settings}
    if settings.get("do_sample"):  # the distribution of the first token
        settings |= {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    if "stop_strings" in settings:
        settings["tokenizer"] = tokenizer
    if ours:
        settings |= {"custom_generate": speculate, "proposer": DraftProposer(Target(model), width=2, length=3)}
    prompts = {"bos_token_id": None, "forced_bos_token_id": PROMPT[:, :1], "eos_token_id": TWO}
    result = model.generate(next((ids for name, ids in prompts.items() if name in settings), PROMPT), **settings)
    if settings.get("do_sample"):
        return [result.scores, tuple(result.sequences[:, :-1].shape)]
    return as_list(result)


def as_list(result: Any) -> list:
    """What can be compared of a result."""
    if isinstance(result, Tensor):
        return [result]
    assert isinstance(result, ModelOutput)
    cache, parts = result.get(CACHE), [name for name in result if name != CACHE]
    keys = [layer.keys for layer in cache.layers] if cache is not None else []
    return [*(result[name] for name in parts), parts, type(cache).__name__, *keys]


def is_same(one: Any, other: Any) -> bool:
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    except (AssertionError, TypeError, ValueError):
        return str(one) == str(other) and not isinstance(one, Tensor)
    return True


def same(one: list, other: list) -> bool:
    return len(one) == len(other) and all(map(is_same, one, other))


def test_every_argument_is_tried() -> None:
    assert {name for name in vars(GenerationConfig()) if name[0] != "_"} == {*TRIALS} == KNOWN_SETTINGS
    call = {*inspect.signature(GenerationMixin.generate).parameters} - {"self", "kwargs"}
    assert call <= {*CALL_ARGUMENTS}
    assert call <= KNOWN_ARGUMENTS
    assert all(name in trial.settings() for name, trial in TRIALS.items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, trial in TRIALS.items() if trial.outcome != REFUSED])
def test_honoured_arguments_change_what_they_change_in_transformers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    trial = TRIALS[name]
    got = run(model, trial.settings(), tokenizer, ours=True)
    if trial.outcome == UNUSED:
        assert same(got, run(model, {}, tokenizer, ours=True))
        return
    assert same(got, run(model, trial.settings(), tokenizer, ours=False))
    without = {key: value for key, value in trial.settings().items() if key != name}
    if name not in ALIKE:
        assert not same(got, run(model, without, tokenizer, ours=False))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, trial in TRIALS.items() if trial.outcome == REFUSED])
def test_other_arguments_are_refused_by_name(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    with pytest.raises(ValueError, match=name.replace("_", "[_ ]") + "|ClassifierFreeGuidance"):
        run(model, TRIALS[name].settings(), tokenizer, ours=True)


class Never(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


def without_padding() -> PreTrainedModel:
    model = tiny("llama", pad_token_id=None)
    model.generation_config.pad_token_id = None
    return model


def in_training() -> PreTrainedModel:
    model = tiny("llama")
    model.model.layers[0].train()
    return model


ROWS: dict[str, Any] = {"inputs": BATCH, "attention_mask": MASK}
WATERMARK = SynthIDTextWatermarkingConfig(5, [1, 2, 3])
# Values that are refused of arguments that are honoured otherwise, and models: the model, settings and the message.
OTHERS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Any], str]] = {
    "a watermark with state": (without_padding, {"watermarking_config": WATERMARK, "do_sample": True}, "SynthIDText"),
    "an offloaded cache": (without_padding, {"cache_implementation": "offloaded"}, "cache_implementation"),
    "an assistant": (without_padding, {"assistant_model": tiny("llama")}, "assistant_model"),
    "several GPUs": (without_padding, {"synced_gpus": True}, "synced_gpus"),
    "attentions": (without_padding, {"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "an encoder's states": (lambda: tiny("gpt2"), {"encoder_hidden_states": torch.zeros(1, 7, 32)}, "encoder_hidden"),
    "an empty prompt": (without_padding, {"attention_mask": torch.zeros(1, 7).long()}, "leaves a prompt empty"),
    "no nodes": (without_padding, {"nodes": 0}, "nodes is 0"),
    "rows that end early": (without_padding, {**ROWS, "stopping_criteria": [Never()]}, "set pad_token_id"),
    "an encoder": (lambda: tiny("t5"), {}, "no decoder-only"),
    "a recurrent state": (lambda: tiny("mamba2"), {}, "cannot branch into a tree"),
    "training mode": (in_training, {}, "training mode"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_done_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", lambda: None)  # transformers makes one for an offloaded cache, even on a CPU
    make, settings, message = OTHERS[name]
    model, settings = make(), {"inputs": PROMPT, "max_new_tokens": 9, **settings}
    with pytest.raises(ValueError, match=message):
        model.generate(custom_generate=speculate, proposer=None, **settings)
