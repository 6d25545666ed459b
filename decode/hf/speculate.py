"""Speculative decoding inside transformers' own `generate`.

Shapes: B rows, L columns of the prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from functools import partial
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from decode.costs import Costs
from decode.devices.cost_curve import CostCurve
from decode.grammars.grammar import AnyGrammar, make_matchers
from decode.grammars.matcher import Constraint
from decode.hf.arguments import (
    drop_ignored,
    find_generate_argument,
    make_stop_criteria,
    refuse_inputs,
    refuse_replaced,
    refuse_settings,
    split_criteria,
)
from decode.hf.call import GenerateCall
from decode.hf.outputs import make_output
from decode.hf.processors import GrammarMasks, make_criterion, make_sampling
from decode.hf.prompts import read_prompts, refuse_prompts
from decode.models.compatibility import refuse_unsupported
from decode.proposer import GivenProposer, as_proposer, check_proposer, find_member
from decode.request import read_requests
from decode.requests.answer import Chunk
from decode.stream import run_requests
from decode.target import Target
from decode.trees.processors import copy_processor

# The targets of each model by `accelerate`. One that uses the model itself is kept without it.
_TARGETS: WeakKeyDictionary[PreTrainedModel, dict[str, Target]] = WeakKeyDictionary()
_FINDING = RLock()  # held while a target is looked for or made


def speculate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    proposer: GivenProposer = "auto",
    nodes: int = 64,
    accelerate: str = "off",
    deterministic: bool | CostCurve = False,
    stop_strings: str | list[str] | None = None,
    grammar: AnyGrammar = None,
    **inputs: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Generate with draft tokens; pass it as `model.generate(..., custom_generate=speculate)`.

    Returns what transformers would return: the same tokens under greedy decoding, the same distribution under sampling,
    reproducible by `torch.manual_seed`. Rows also end at the model's context length.

    proposer, nodes, grammar: as in `decode.stream`; a grammar needs `tokenizer`, as `stop_strings` do. accelerate,
    deterministic: as in `Target`. The accelerated copy is kept, and follows the model's weights and adapters
    (`Target.weights_changed`). Hooks that are added later are not noticed. The model is tested once and never changed.

    Logits processors and stopping criteria see one row at a time, with its padding, and no token after the row's end.
    A single row has the objects themselves. In a batch each row has a deep copy of yours, with its own row of the
    attributes that hold something for each row: tensors [B, ...], lists of B things that are no numbers, dicts by row.
    Results are [1, V] and [1]; of [B, V] and [B] each row takes its own. With `output_scores`, the objects or, for a
    single row, copies are called a second time.
    Rows that end early are padded, even if no end token is set. stop_strings: with `tokenizer`, as arguments of
    `generate`; in a generation config transformers refuses them for callables.

    Raises ValueError for settings that cannot be honoured, and for models that cannot be a target; FloatingPointError
    for a row whose logits or processed scores are NaN or infinite.
    """
    streamer, tokenizer = (inputs.pop(name, None) or find_generate_argument(name) for name in ("streamer", "tokenizer"))
    check_proposer(proposer)
    refuse_unsupported(model)
    refuse_replaced(model)
    refuse_settings(model, generation_config, logits_processor)
    refuse_inputs(model, inputs)
    prompts = read_prompts(input_ids, drop_ignored(model, inputs), generation_config)
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"a streamer takes the tokens of one row; the batch has {len(input_ids)}")
    criteria = StoppingCriteriaList([*stopping_criteria, *make_stop_criteria(stop_strings, tokenizer)])
    max_new_tokens, stop_ids, criteria = split_criteria(criteria, input_ids.shape[1])
    pad = generation_config.pad_token_id
    pad = next(iter(stop_ids), None) if pad is None else pad
    returns_cache = prompts.cache is not None and getattr(prompts.cache, "_is_user_defined", False)
    returns_logits = bool(generation_config.output_scores or generation_config.output_logits)
    returns_more = bool(generation_config.return_dict_in_generate)
    target = _find_target(model, accelerate, deterministic)
    refuse_prompts(target, prompts)
    returns_any = returns_more or returns_cache
    is_recorded = not target.is_recurrent  # `make_output` runs such a model once more
    call = GenerateCall(prompts, is_recorded and returns_any, is_recorded and returns_more and returns_logits)
    proposer, context = as_proposer(proposer, target), target.context - prompts.extra_positions
    may_end_early = criteria or grammar is not None or max(map(len, prompts.tokens)) + max_new_tokens > context
    if pad is None and len(input_ids) > 1 and may_end_early:
        raise ValueError("rows that end before the others are padded; set pad_token_id")

    ends = [token for token in stop_ids if 0 <= token < target.vocabulary]  # a model's -1 means none
    # With `output_scores`, processors are called a second time, so a single row's need a copy of their own.
    copies = len(input_ids) == 1 and returns_more and generation_config.output_scores
    first = LogitsProcessorList([*map(copy_processor, logits_processor)]) if copies else logits_processor
    if grammar is not None:
        grammar = make_matchers(grammar, tokenizer, target.vocabulary, frozenset(ends))
    requests = read_requests(
        target,
        prompts.tokens,
        sampling=make_sampling(generation_config, logits_processor, prompts),
        max_new_tokens=max_new_tokens,
        stop_ids=ends,
        criterion=make_criterion(criteria, prompts) if criteria else None,
        nodes=nodes,
        text=False,
        grammar=grammar,
        is_alone=len(input_ids) == 1,
        sampled=find_member(proposer, "sampled"),
    )
    for request in requests:
        request.call, request.context = call, context
    sequences, counts = _collect(run_requests(target, requests, proposer, nodes), input_ids, streamer, pad or 0)
    if grammar is not None:  # for the scores
        rows = [Constraint(partial(grammar, row), target.vocabulary) for row in range(len(input_ids))]
        first = LogitsProcessorList([GrammarMasks(rows, input_ids.shape[1], counts), *first])
    if returns_any:
        output = make_output(model, call, sequences, counts, generation_config, first)
    return output if generation_config.return_dict_in_generate else sequences


def _collect(
    chunks: Iterable[Chunk], input_ids: Tensor, streamer: BaseStreamer | None, pad: int
) -> tuple[Tensor, list[int]]:
    """Prompts and answers, padded to the longest, and each answer's length.

    The streamer gets each step's tokens at once. Raises FloatingPointError for a row that ended in an error.
    """
    answers: list[list[int]] = [[] for _ in input_ids]
    for chunk in chunks:
        if chunk.answer is not None and (error := chunk.answer.exception) is not None:
            raise FloatingPointError(f"row {chunk.request_id}: {error}") if type(error) is FloatingPointError else error
        answers[chunk.request_id] += chunk.tokens
        if streamer is not None:
            streamer.put(torch.tensor(chunk.tokens))
    if streamer is not None:
        streamer.end()
    longest = max(map(len, answers))
    padded = [[*answer, *[pad] * (longest - len(answer))] for answer in answers]
    return torch.cat([input_ids, torch.tensor(padded).to(input_ids)], dim=1), [*map(len, answers)]


def _find_target(model: PreTrainedModel, accelerate: str, deterministic: bool | CostCurve) -> Target:
    """The model as a target. If the model is new or has changed, it is made, or made anew, and tested."""
    with _FINDING:
        targets = _TARGETS.setdefault(model, {})
        target = copy(targets[accelerate]) if accelerate in targets else None
        if target is not None:
            target.model = model if target.model is None else target.model
        if target is None or not _follows(target):
            target = Target(model, accelerate=accelerate)
        kept = targets[accelerate] = copy(target)
        if kept.model is model:
            kept.model = None  # otherwise the dictionary's value would keep its key alive
    if deterministic:
        target = copy(target)
        target.costs = Costs(deterministic)
    return target


def _follows(target: Target) -> bool:
    """Whether a target is right for its model as it is now. Its copies of changed weights are made anew."""
    try:
        target.weights_changed()
    except ValueError:
        return False
    return True
