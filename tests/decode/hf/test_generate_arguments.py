"""Every argument of transformers' `generate` does with `speculate` what docs/generate.md says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from decode import Target, speculate
from decode.hf.arguments import KNOWN_ARGUMENTS, KNOWN_SETTINGS
from proposers import DraftProposer
from tests.support.models import CACHE, CONTEXT, tiny
from tests.support.speculating import BATCH, MASK, PROMPT
from tests.test_docs import read_table

TWO = torch.cat([PROMPT, PROMPT.flip(1)])
Parts = tuple[list[str], list[Any]]  # of a result: their names, and their numbers
ALIKE = ("disable_compile", "remove_invalid_values", "use_cache", "max_cache_len", "do_sample")  # other than in tokens


def read_outcomes(kind: str) -> dict[str, str]:
    """What docs/generate.md says of each argument: honoured, refused or no effect."""
    rows = read_table("docs/generate.md", f"| {kind} | with `speculate` | |")
    return {name.strip("`"): outcome for names, outcome, _ in rows for name in names.split(", ")}


OUTCOMES = read_outcomes("field of `GenerationConfig`")
SAMPLE = {"do_sample": True}
RETURN = {"return_dict_in_generate": True}
# Each field of `GenerationConfig`: the value to try, and other fields that it needs.
END, PENALIZED = {"eos_token_id": [*range(3, 60)]}, [*range(40, 90)]
TRIALS: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_length": (12, {"max_new_tokens": None}),
    **dict.fromkeys(("max_new_tokens", "decoder_start_token_id"), (5, {})),
    "min_length": (15, END),
    "min_new_tokens": (6, END),
    **dict.fromkeys(("do_sample", "early_stopping", "is_assistant", "low_memory", "remove_invalid_values"), (True, {})),
    **dict.fromkeys(("disable_compile", "return_dict_in_generate", "token_healing", "use_mtp"), (True, {})),
    "max_time": (1e-9, {}),
    "stop_strings": (["J@"], {}),
    **dict.fromkeys(("num_beams", "num_beam_groups"), (2, {})),
    "use_cache": (False, RETURN),
    "cache_implementation": ("static", RETURN),
    "cache_config": ({"nbits": 4}, {}),
    "max_cache_len": (90, {"cache_implementation": "static", **RETURN}),
    **dict.fromkeys(("temperature", "top_p", "typical_p"), (0.5, SAMPLE)),
    "top_k": (5, SAMPLE),
    "min_p": (0.2, SAMPLE),
    "top_h": (0.4, SAMPLE),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0.02, SAMPLE)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), (1.5, {})),
    "length_penalty": (2.0, {}),
    "no_repeat_ngram_size": (1, {}),
    "encoder_no_repeat_ngram_size": (1, {"max_new_tokens": 60}),
    "bad_words_ids": ([[token] for token in PENALIZED], {}),
    "renormalize_logits": (True, {"top_k": 5, **SAMPLE}),
    "forced_bos_token_id": (44, {}),
    "forced_eos_token_id": (55, {}),
    "exponential_decay_length_penalty": ((2, 3.0), {"eos_token_id": [*range(50, 56)]}),
    "suppress_tokens": (PENALIZED, {}),
    "begin_suppress_tokens": ([*range(3, 90)], {}),
    "sequence_bias": ([[[token], -50.0] for token in PENALIZED], {}),
    "watermarking_config": (WatermarkingConfig(bias=9.0), {}),
    "num_return_sequences": (3, SAMPLE),
    **dict.fromkeys([f"output_{name}" for name in ("attentions", "hidden_states", "scores", "logits")], (True, RETURN)),
    "pad_token_id": (1, {"eos_token_id": 24}),
    "bos_token_id": (7, {}),
    "eos_token_id": (END["eos_token_id"], {}),
    **dict.fromkeys(("num_assistant_tokens", "assistant_lookbehind", "target_lookbehind"), (3, {})),
    **dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size", "prefill_chunk_size"), (3, {})),
    "num_assistant_tokens_schedule": ("heuristic", {}),
    "assistant_confidence_threshold": (0.9, {}),
    "assistant_early_exit": (1, {}),
    **dict.fromkeys(("assistant_ensemble_weight", "diversity_penalty"), (0.5, {})),
    "speculation_type": ("dflash", {}),
    "compile_config": (CompileConfig(), {}),
    "continuous_batching_config": (ContinuousBatchingConfig(), {}),
    "penalty_alpha": (0.6, {"top_k": 4}),
    "dola_layers": ("high", {}),
    "constraints": ([1], {}),
    "force_words_ids": ([[5]], {}),
    "transformers_version": ("5.0.0", {}),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("llama", attn_implementation="eager")


def run(model: PreTrainedModel, settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase, ours: bool) -> Parts:
    """What can be compared of the result of `generate`."""
    settings = deepcopy({"max_new_tokens": 9, "pad_token_id": 0, **settings})
    if settings.get("do_sample"):  # the distribution of the first token
        settings |= {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    if "stop_strings" in settings:
        settings["tokenizer"] = tokenizer
    if ours:
        settings |= {"custom_generate": speculate, "proposer": DraftProposer(Target(model), width=2, depth=3, nodes=7)}
    prompts = {"bos_token_id": None, "forced_bos_token_id": PROMPT[:, :1], "eos_token_id": TWO}
    result = model.generate(next((ids for name, ids in prompts.items() if name in settings), PROMPT), **settings)
    if settings.get("do_sample"):
        return [], [result.scores, tuple(result.sequences[:, :-1].shape)]
    if isinstance(result, Tensor):
        return [], [result]
    cache, parts = result.get(CACHE), [name for name in result if name != CACHE]
    keys = [layer.keys for layer in cache.layers] if cache is not None else []
    return [*parts, type(cache).__name__], [*(result[name] for name in parts), *keys]


def same(one: Parts, other: Parts) -> bool:
    try:
        torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-5)
    except AssertionError:
        return False
    return one[0] == other[0]


def test_every_argument_is_tried() -> None:
    assert {name for name in vars(GenerationConfig()) if name[0] != "_"} == {*TRIALS} == {*OUTCOMES} == KNOWN_SETTINGS
    call = {*inspect.signature(GenerationMixin.generate).parameters} - {"self", "kwargs"}
    assert call <= {*read_outcomes("argument of the call")} & KNOWN_ARGUMENTS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRIALS)
def test_arguments_do_what_the_table_says(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Honoured ones change what they change in transformers; refused ones are named."""
    value, others = TRIALS[name]
    settings = {name: value, **others}
    if OUTCOMES[name] == "refused":
        with pytest.raises(ValueError, match=name.replace("_", "[_ ]") + "|ClassifierFreeGuidance"):
            run(model, settings, tokenizer, ours=True)
        return
    got = run(model, settings, tokenizer, ours=True)
    if OUTCOMES[name] == "no effect":
        assert same(got, run(model, {}, tokenizer, ours=True))
        return
    assert OUTCOMES[name] == "honoured" and same(got, run(model, settings, tokenizer, ours=False))
    if name not in ALIKE:
        assert not same(got, run(model, others, tokenizer, ours=False))


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
    "a full context": (without_padding, {"inputs": torch.full((1, CONTEXT), 7)}, "leave no room"),
    "no tokenizer": (without_padding, {"stop_strings": ["J@"]}, "stop_strings need the tokenizer"),
    "a batch's streamer": (without_padding, {**ROWS, "streamer": Mock()}, "a streamer takes the tokens of one row"),
    "an encoder": (lambda: tiny("t5"), {}, "no decoder-only"),
    "a recurrent state": (lambda: tiny("jamba"), {}, "jamba (fails|cannot)"),
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
