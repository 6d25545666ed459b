"""The arguments of transformers' `generate`: what `speculate` takes over, and what it refuses."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
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

# Settings that are refused, and their values that ask for nothing special.
REFUSED_SETTINGS = {
    **dict.fromkeys(("num_beams", "num_beam_groups"), (None, 1)),
    **dict.fromkeys(("constraints", "force_words_ids", "dola_layers"), (None,)),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit"), (None,)),
    "is_assistant": (None, False),
    **dict.fromkeys(("penalty_alpha", "use_mtp"), (None, 0)),
    "cache_implementation": (None, "dynamic", "static"),  # others trade memory for speed, or change the logits
}
REFUSED_PROCESSORS = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale runs the model a second time for each token",
    SynthIDTextWatermarkLogitsProcessor: "this watermark keeps a state between calls, which draft tokens would disturb",
}
INPUTS = {
    *("attention_mask", "position_ids", "token_type_ids", "inputs_embeds", "past_key_values"),
    *("use_cache", "logits_to_keep", "output_attentions", "output_hidden_states"),
}


def find_generate_argument(name: str) -> Any:
    """An argument of the `generate` call that is running; None without one.

    Up to version 5.23, transformers does not pass the streamer, the assistant model and the tokenizer on to callables.
    """
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, sys._getframe(1)
    while frame.f_code is not code:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    # `generate` takes the tokenizer out of its keyword arguments. torch's wrapper around it still has them.
    passed = frame.f_back.f_locals.get("kwargs") if frame.f_back is not None else None
    return frame.f_locals.get(name, passed.get(name) if isinstance(passed, dict) else None)


def make_stop_criteria(strings: str | list[str] | None) -> list[StopStringCriteria]:
    """The criterion for `stop_strings`, with the tokenizer that was passed to `generate`.

    Raises ValueError without a tokenizer.
    """
    if strings is None:
        return []
    tokenizer = find_generate_argument("tokenizer")
    if tokenizer is None:
        raise ValueError(
            "stop_strings need the tokenizer: model.generate(..., stop_strings=[...], tokenizer=tokenizer)"
        )
    return [StopStringCriteria(tokenizer, strings)]


def refuse_settings(model: PreTrainedModel, config: GenerationConfig, processors: Sequence[LogitsProcessor]) -> None:
    """Raise ValueError for settings and logits processors that cannot be honoured."""
    settings = {name: getattr(config, name, None) for name in REFUSED_SETTINGS}
    refused = [f"{name}={value!r}" for name, value in settings.items() if value not in REFUSED_SETTINGS[name]]
    refused += [name for name in ("assistant_model", "synced_gpus") if find_generate_argument(name)]
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


def refuse_inputs(inputs: dict[str, Any]) -> None:
    """Raise ValueError for model inputs that cannot be honoured."""
    unknown = sorted(name for name, value in inputs.items() if name not in INPUTS and value is not None)
    if unknown:
        raise ValueError(f"speculate cannot honour {', '.join(unknown)}; leave it out, or generate without speculate")


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
