"""The arguments of transformers' `generate`: what `speculate` takes over, and what it refuses."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.cache_utils import Cache

from decode.hf.kv_states import count_cached
from decode.models.compatibility import CACHE_NAMES

# Settings that are refused, and their values that ask for nothing special.
REFUSED_SETTINGS = {
    **dict.fromkeys(("num_beams", "num_beam_groups"), (None, 1)),
    **dict.fromkeys(("constraints", "force_words_ids", "dola_layers"), (None,)),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit"), (None,)),
    "is_assistant": (None, False),
    **dict.fromkeys(("penalty_alpha", "use_mtp"), (None, 0)),
    "cache_implementation": (None, "dynamic", "static"),  # others trade memory for speed, or change the logits
}
# Settings that are honoured, or that ask for nothing here. A later version of transformers may have others.
KNOWN_SETTINGS = {
    *REFUSED_SETTINGS,
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample"),
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
    *("token_healing", "guidance_scale", "watermarking_config", "num_return_sequences", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "pad_token_id", "bos_token_id"),
    *("eos_token_id", "decoder_start_token_id", "use_cache", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("early_stopping", "length_penalty", "diversity_penalty", "low_memory", "compile_config", "disable_compile"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "speculation_type"),
    *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("continuous_batching_config", "transformers_version"),
}
# The arguments of the call itself, but for those that become settings and inputs.
REFUSED_ARGUMENTS = "assistant_model", "synced_gpus"
KNOWN_ARGUMENTS = {
    *REFUSED_ARGUMENTS,
    *("self", "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
    *("streamer", "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate", "kwargs"),
}
REFUSED_PROCESSORS = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale runs the model a second time for each token",
    SynthIDTextWatermarkLogitsProcessor: "this watermark keeps a state between calls, which draft tokens would disturb",
}
INPUTS = {
    *CACHE_NAMES,
    *("attention_mask", "position_ids", "token_type_ids", "inputs_embeds"),
    *("use_cache", "logits_to_keep", "output_attentions", "output_hidden_states"),
}


def find_generate_argument(name: str) -> Any:
    """An argument of the `generate` call that is running; None without one.

    Up to 5.24, transformers does not pass the streamer, the assistant model and the tokenizer on to callables, so they
    are looked for in the frames of `generate` and of the wrappers around it: it takes the tokenizer out of its own.
    """
    codes, function = set[CodeType](), GenerationMixin.generate
    while function is not None:
        codes.add(function.__code__)
        function = getattr(function, "__wrapped__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    while frame is not None and frame.f_code in codes:
        for passed in (frame.f_locals, frame.f_locals.get("kwargs", {})):
            if passed.get(name) is not None:
                return passed[name]
        frame = frame.f_back
    return None


def make_stop_criteria(strings: str | list[str] | None, tokenizer: Any) -> list[StopStringCriteria]:
    """The criterion for `stop_strings`. Raises ValueError without a tokenizer."""
    if strings is None:
        return []
    if tokenizer is None:
        raise ValueError(
            "stop_strings need the tokenizer: model.generate(..., stop_strings=[...], tokenizer=tokenizer)"
        )
    return [StopStringCriteria(tokenizer, strings)]


def refuse_settings(model: PreTrainedModel, config: GenerationConfig, processors: Sequence[LogitsProcessor]) -> None:
    """Raise ValueError for settings and logits processors that cannot be honoured."""
    settings = {name: getattr(config, name, None) for name in REFUSED_SETTINGS}
    refused = [f"{name}={value!r}" for name, value in settings.items() if value not in REFUSED_SETTINGS[name]]
    refused += [name for name in REFUSED_ARGUMENTS if find_generate_argument(name)]
    refused += _unknown_settings(config)
    if refused:
        raise ValueError(f"speculate cannot honour {refused[0]}; leave it out, or generate without speculate")
    if config.output_attentions and config.return_dict_in_generate and model.config._attn_implementation != "eager":
        raise ValueError(
            "speculate cannot honour output_attentions: only eager attention returns its weights; "
            "load the model with attn_implementation='eager'"
        )
    for processor in processors:
        if type(processor) in REFUSED_PROCESSORS:
            reason = REFUSED_PROCESSORS[type(processor)]
            raise ValueError(f"speculate cannot honour {type(processor).__name__}: {reason}")


def refuse_replaced(model: PreTrainedModel) -> None:
    """Raise ValueError for what changes inputs of the model's forward passes from outside: there are other passes here.

    peft's prompt learning puts a method of its own in the model, and its `adapter_names` hooks in the layers.
    """
    replaced = vars(model).get("prepare_inputs_for_generation")
    if replaced is not None and getattr(replaced, "__self__", None) is not model:
        raise ValueError(
            "prepare_inputs_for_generation of this model was replaced, as by a prompt-learning adapter of peft; "
            "speculate calls the model without it: use an adapter within layers, such as LoRA"
        )
    hooks = [
        (module._forward_pre_hooks, key)
        for module in model.modules()
        for key, hook in module._forward_pre_hooks.items()
        if "adapter_names" in getattr(hook, "keywords", ())
    ]
    for known, key in hooks:  # peft does not remove them after an error
        del known[key]
    if hooks:
        raise ValueError(
            "speculate cannot honour adapter_names; decode the rows of each adapter alone, or add requests to an "
            "engine: Engine.add(..., adapter=...)"
        )


def _unknown_settings(config: GenerationConfig) -> Iterator[str]:
    """Settings and arguments that only a later transformers has, if they are not at their default."""
    filled: dict[str, Any] = GenerationConfig._get_default_generation_params()
    for name, default in vars(GenerationConfig()).items():
        value = getattr(config, name, None)
        if name[0] != "_" and name not in KNOWN_SETTINGS and not _is_one_of(value, default, filled.get(name)):
            yield f"{name}={value!r}"
    for name, parameter in inspect.signature(GenerationMixin.generate).parameters.items():
        if name not in KNOWN_ARGUMENTS and not _is_one_of(find_generate_argument(name), parameter.default):
            yield name


def _is_one_of(value: Any, *defaults: Any) -> bool:
    """Whether a value asks for nothing: it is None or a default."""
    return value is None or (not isinstance(value, Tensor) and any(value is each or value == each for each in defaults))


def refuse_inputs(model: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
    """Raise ValueError for model inputs that cannot be honoured, unless they carry nothing.

    That is None, an empty KV cache, the forward's own default or what the model's config has by the same name.
    """
    parameters = inspect.signature(type(model).forward).parameters
    unknown = []
    for name, value in inputs.items():
        default = parameters[name].default if name in parameters else None
        is_empty = isinstance(value, Cache) and count_cached(value) == 0
        if name not in INPUTS and not is_empty and not _is_one_of(value, default, getattr(model.config, name, None)):
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"speculate cannot honour {', '.join(sorted(unknown))}; leave it out, or generate without speculate"
        )


def drop_ignored(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """The model's inputs without token types that its own `prepare_inputs_for_generation` drops."""
    types = inputs.get("token_type_ids")
    if types is None:
        return inputs
    ids = torch.zeros_like(types)
    prepared = model.prepare_inputs_for_generation(ids, is_first_iteration=True, use_cache=True, token_type_ids=types)
    return {name: value for name, value in inputs.items() if name != "token_type_ids" or name in prepared}


def split_criteria(criteria: StoppingCriteriaList, length: int) -> tuple[int, list[int], StoppingCriteriaList]:
    """The largest number of new tokens, the end tokens, and all other criteria."""
    longest, stop_ids, others = 1 << 30, [], StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            longest = min(longest, criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            stop_ids += criterion.eos_token_id.flatten().tolist()
        else:
            others.append(criterion)
    return max(1, longest - length), stop_ids, others  # transformers also generates one token before it checks
