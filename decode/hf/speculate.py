"""Speculative decoding inside transformers' own `generate`: its preparation, its settings and its result.

    model.generate(**inputs, custom_generate=speculate, proposer=NGramProposer(), max_new_tokens=100)

Shapes: B rows, L tokens of a prompt with its padding on the left.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from decode.answer import Chunk
from decode.cpu.packed_linear import can_pack
from decode.loop import stream
from decode.masks import attention_windows
from decode.models.compatibility import refuse_unsupported
from decode.proposer import Proposer
from decode.sampling import RequestProcessor, Sampling
from decode.target import Target

# Settings of generate() that another way of decoding would have to honour, and the values that ask for nothing.
REFUSED_SETTINGS = {
    **dict.fromkeys(("num_beams", "num_beam_groups"), (None, 1)),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), (None, False)),
    **dict.fromkeys(("constraints", "force_words_ids", "dola_layers"), (None,)),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit"), (None,)),
    **dict.fromkeys(("penalty_alpha", "use_mtp"), (None, 0)),
    "cache_implementation": (None, "dynamic", "static"),  # the others trade memory for speed, or change the logits
}
REFUSED_PROCESSORS = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale runs the model a second time for each token",
    SynthIDTextWatermarkLogitsProcessor: "this watermark keeps a state from call to call, which guesses would disturb",
}
HONOURED_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
# The warpers that `Sampling` has itself, in transformers' order.
WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
SAMPLE = 64  # numbers of a packed weight that are looked at to see whether it has changed

# What the self-test of each model led to, by `accelerate`. A target that uses the model itself is kept without it.
_TARGETS: WeakKeyDictionary[PreTrainedModel, dict[str, tuple[Any, Target]]] = WeakKeyDictionary()


def speculate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    proposer: Proposer | None = None,
    nodes: int = 64,
    accelerate: str = "off",
    **inputs: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """What `model.generate(..., custom_generate=speculate)` calls; it takes `proposer`, `nodes` and `accelerate` as well.

    Returns what transformers' greedy decoding and sampling do: the same tokens where greedy, and the same law where
    sampled, reproducible by `torch.manual_seed`; but rows end where the model's context does. proposer and nodes are
    those of `decode.stream`; accelerate is that of `Target`, whose copy is kept until the model's weights change (hooks
    that are added later are not noticed). The model is wrapped and tested once and never changed.

    Logits processors and stopping criteria see one row at a time, with the padding that it was given, and never a
    token beyond the row's end. Rows that end before the others are padded, also where transformers would go on with
    them because no end token is set. `stop_strings` cannot be used, since transformers keeps the tokenizer from
    callables: give `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`, which is the same.

    Raises ValueError for settings that it cannot honour and models that cannot be a target.
    """
    streamer = inputs.pop("streamer", None) or _argument_of_generate("streamer")
    refuse_unsupported(model)
    _refuse_settings(generation_config, logits_processor)
    _refuse_inputs(input_ids, inputs)
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"a streamer takes the tokens of one row; the batch has {len(input_ids)}")
    real, length = _real_tokens(input_ids, inputs), input_ids.shape[1]
    prompts = [row[mask].tolist() for row, mask in zip(input_ids, real, strict=True)]
    padding = [row[~mask] for row, mask in zip(input_ids, real, strict=True)]
    most, stop_ids, criteria = _split_criteria(stopping_criteria, length)
    pad = generation_config.pad_token_id
    pad = next(iter(stop_ids), None) if pad is None else pad
    target = _wrap(model, accelerate)
    if pad is None and len(prompts) > 1 and (criteria or max(map(len, prompts)) + most > target.context):
        raise ValueError("rows that end before the others are padded; set pad_token_id")

    def ends(row: int, tokens: list[int]) -> bool:
        given = torch.cat([padding[row], torch.tensor(tokens).to(input_ids)])
        return bool(criteria(given[None], None).any())

    chunks = stream(
        target,
        prompts,
        proposer,
        sampling=_choose_sampling(generation_config, logits_processor, padding),
        max_new_tokens=most,
        stop_ids=stop_ids,
        criterion=ends if criteria else None,
        nodes=nodes,
        text=False,
    )
    sequences = _collect(chunks, input_ids, streamer, pad or 0)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


def _collect(chunks: Iterable[Chunk], input_ids: Tensor, streamer: BaseStreamer | None, pad: int) -> Tensor:
    """Prompts and answers side by side, padded to the longest; each step goes to the streamer as it comes."""
    answers: list[list[int]] = [[] for _ in input_ids]
    for chunk in chunks:
        answers[chunk.request_id] += chunk.tokens
        if streamer is not None:
            streamer.put(torch.tensor(chunk.tokens))
    if streamer is not None:
        streamer.end()
    longest = max(map(len, answers))
    padded = [[*answer, *[pad] * (longest - len(answer))] for answer in answers]
    return torch.cat([input_ids, torch.tensor(padded).to(input_ids)], dim=1)


def _argument_of_generate(name: str) -> Any:
    """An argument of the `generate` that called; None where none did.

    Up to 5.23 transformers hands a callable neither the streamer nor the assistant model and says nothing about it:
    whoever reads from the streamer would wait for good.
    """
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, sys._getframe(1)
    while frame.f_code is not code:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_locals.get(name)


def _refuse_settings(config: GenerationConfig, processors: Sequence[LogitsProcessor]) -> None:
    for name, harmless in REFUSED_SETTINGS.items():
        value = getattr(config, name, None)
        if value not in harmless:
            raise ValueError(f"speculate cannot honour {name}={value!r}; leave it out, or generate without speculate")
    for name in ("assistant_model", "synced_gpus"):
        if _argument_of_generate(name):
            raise ValueError(f"speculate cannot honour {name}; leave it out, or generate without speculate")
    for processor in processors:
        if type(processor) in REFUSED_PROCESSORS:
            reason = REFUSED_PROCESSORS[type(processor)]
            raise ValueError(f"speculate cannot honour {type(processor).__name__}: {reason}")


def _refuse_inputs(input_ids: Tensor, inputs: dict[str, Any]) -> None:
    strange = sorted(name for name, value in inputs.items() if name not in HONOURED_INPUTS and value is not None)
    if strange:
        raise ValueError(f"speculate cannot honour {', '.join(strange)}; a prompt is input_ids and an attention_mask")
    cache = inputs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        raise ValueError("speculate cannot honour past_key_values: it has a KV cache of its own and reads all tokens")
    if input_ids.numel() == 0:
        raise ValueError("the prompt is empty; it needs at least one token")


def _real_tokens(input_ids: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Which tokens are no padding, [B, L] bool."""
    mask = inputs.get("attention_mask")
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device) != 0
    if bool((real[:, 1:] < real[:, :-1]).any()):
        raise ValueError("attention_mask has zeros after ones; speculate takes padding on the left only")
    if not bool(real.any(dim=1).all()):
        raise ValueError("attention_mask leaves a prompt empty; it needs at least one token")
    positions = inputs.get("position_ids")
    if positions is not None and bool((positions.to(real.device) != real.cumsum(dim=1) - 1)[..., real].any()):
        raise ValueError("speculate cannot honour position_ids other than 0, 1, 2, ... behind the padding")
    return real


def _split_criteria(criteria: StoppingCriteriaList, length: int) -> tuple[int, list[int], StoppingCriteriaList]:
    """The most new tokens, the end tokens, and the criteria that remain to be asked."""
    longest, stop_ids, others = 1 << 30, [], StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            longest = min(longest, criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            stop_ids += criterion.eos_token_id.flatten().tolist()
        else:
            others.append(criterion)
    return max(1, longest - length), stop_ids, others  # transformers, too, makes one token before it asks


def _choose_sampling(
    config: GenerationConfig, processors: Sequence[LogitsProcessor], padding: Sequence[Tensor]
) -> Sampling:
    """The law that transformers' prepared processors, warpers among them, describe."""
    others, settings = list(processors), {"temperature": 1.0} if config.do_sample else {"seed": 0}
    for name, kind in reversed(WARPERS.items()):  # those at the end; `Sampling` has them for all rows at once
        last = others[-1] if others and config.do_sample else None
        if type(last) is kind and getattr(last, name) > 0 and getattr(last, "min_tokens_to_keep", 1) == 1:
            settings[name] = getattr(others.pop(), name)
    if others:
        copies = config.num_return_sequences or 1
        rows = [[_narrow(each, row, copies) for each in others] for row in range(len(padding))]
        others = [_RowByRow(rows, padding)]
    return Sampling(processors=others, **settings)


class _RowByRow(RequestProcessor):
    """Logits processors made for a padded batch, asked about one row at a time."""

    def __init__(self, rows: Sequence[Sequence[LogitsProcessor]], padding: Sequence[Tensor]) -> None:
        self.rows, self.padding = rows, padding

    def __call__(self, input_ids: Tensor, scores: Tensor, row: int) -> Tensor:
        given = torch.cat([self.padding[row].to(input_ids.device), input_ids[0]])
        for processor in self.rows[row]:
            scores = processor(given[None], scores)
        return scores


def _narrow(processor: LogitsProcessor, row: int, copies: int) -> LogitsProcessor:
    """The processor for one row, where it holds something for each row of the batch."""
    own = copy(processor)
    if isinstance(own, RepetitionPenaltyLogitsProcessor) and isinstance(own.prompt_ignore_length, Tensor):
        own.prompt_ignore_length = own.prompt_ignore_length[row : row + 1]
    elif isinstance(own, PrefixConstrainedLogitsProcessor):
        allowed = own._prefix_allowed_tokens_fn
        own._prefix_allowed_tokens_fn = lambda _, tokens: allowed(row, tokens)
    elif isinstance(own, EncoderRepetitionPenaltyLogitsProcessor):
        own.encoder_input_ids = own.encoder_input_ids[row // copies][None]
    elif isinstance(own, EncoderNoRepeatNGramLogitsProcessor):
        own.generated_ngrams, own.batch_size = own.generated_ngrams[row // copies :][:1], 1
    return own


def _wrap(model: PreTrainedModel, accelerate: str) -> Target:
    """The model as a target, tested when first seen and whenever it has changed."""
    known, state = _TARGETS.setdefault(model, {}), _state_of(model, accelerate)
    if accelerate not in known or known[accelerate][0] != state:
        target = Target(model, accelerate=accelerate)
        if target.model is model:
            target = copy(target)
            target.model = None  # or the memory would keep its own key alive
        known[accelerate] = state, target
    target = copy(known[accelerate][1])
    target.model = model if target.model is None else target.model
    return target


def _state_of(model: PreTrainedModel, accelerate: str) -> Any:
    """What changes when the model moves, gets another vocabulary, window or attention or, once packed, other weights.

    Merged adapters write into weights without a new version, so some of each weight's numbers are looked at, too.
    """
    packed = [module.weight.detach() for module in model.modules() if accelerate != "off" and can_pack(module)]
    samples = [weight.flatten()[:: max(1, weight.numel() // SAMPLE)].tolist() for weight in packed]
    versions = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in packed]
    shared = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()) if accelerate != "off"]
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    kind = model.config._attn_implementation, model.dtype, model.device, vocabulary, attention_windows(model)
    return kind, shared, versions, samples
