"""What `generate` returns in addition to the tokens: scores, logits, hidden states, attentions and the KV cache.

Shapes: B rows, C columns of the prompts, T new tokens of the longest row, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput

from decode.hf.call import GenerateCall
from decode.hf.kv_states import read_layers, write_cache
from decode.hf.prompts import Prompts, extend_columns
from decode.models.compatibility import find_cache_name
from decode.trees.tree import Tree

PASS_OUTPUTS = ("attentions", "hidden_states")


def make_output(
    model: PreTrainedModel,
    call: GenerateCall,
    sequences: Tensor,
    counts: Sequence[int],
    config: GenerationConfig,
    processors: LogitsProcessorList,
) -> GenerateDecoderOnlyOutput:
    """transformers' result for `sequences`. Row b has `counts[b]` new tokens, then padding.

    The cache in the prompts is filled, whether it is the user's or one that `generate` made.
    """
    prompts, new = call.prompts, max(counts)
    names = PASS_OUTPUTS if config.return_dict_in_generate else ()
    wanted = [name for name in names if getattr(config, f"output_{name}")]
    wants_logits = bool(names) and bool(config.output_scores or config.output_logits)
    logits, every = list[Tensor](), dict[str, Any]()
    if not call.keeps_rows:  # of a recurrent target
        if wanted or wants_logits or prompts.cache is not None:
            every = _run_again(model, prompts, sequences, new, prompts.cache, wanted)  # which fills the cache
            logits = [*every["logits"][:, -new:].float()]
    else:
        before = _copy_cache(model, prompts) if wanted and prompts.past else None
        logits = _complete(call, sequences, counts)
        if prompts.cache is not None:
            rows = [call.ended[row].cache for row in range(len(counts))]
            write_cache(prompts.cache, rows, prompts.past, prompts.columns + new - 1)
        every = _run_again(model, prompts, sequences, new, before, wanted) if wanted else {}
    fields: dict[str, Any] = {"sequences": sequences}  # an output keeps the class's order
    if wants_logits:
        steps = torch.stack(logits, dim=1).to(sequences.device).unbind()  # T of [B, V]
        if config.output_scores:
            ends = range(sequences.shape[1] - new, sequences.shape[1])
            # As transformers does, so that the scores are the same where processors change the logits themselves.
            fields["scores"] = tuple(
                processors(sequences[:, :end], step) for end, step in zip(ends, steps, strict=True)
            )
        fields["logits"] = steps if config.output_logits else None
    read = prompts.columns - prompts.past
    for name in wanted:
        fields[name] = _split(every[name], read, new, config.use_cache, is_attention=name == "attentions")
    return GenerateDecoderOnlyOutput(**fields, **{find_cache_name(GenerateDecoderOnlyOutput): prompts.cache})


@torch.inference_mode()  # as in the loop
def _complete(call: GenerateCall, sequences: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Let rows that ended before the others go on with padding, as in transformers.

    In the end, all have states of all columns but the last. Returns the logits [T, V] that were recorded of each row.
    """
    prompts, new = call.prompts, max(counts)
    for row, count in enumerate(counts):
        session = call.ended[row]
        session.rewind(0, prompts.columns - prompts.first[row] + count - 1)
        if count < new:
            tokens = sequences[row, count - new - 1 : -1].tolist()
            call.record_logits(row, session.verify(Tree.chain([tokens])).logits[0])
            session.keep([range(len(tokens))])
    return [torch.cat(parts) for parts in call.logits if parts]


def _copy_cache(model: PreTrainedModel, prompts: Prompts) -> Cache:
    """The user's cache as it is now."""
    assert prompts.cache is not None
    copied = DynamicCache(config=model.config.get_text_config(decoder=True))
    for number, both in enumerate(read_layers(prompts.cache, prompts.past)):
        if both is not None:
            copied.update(*both, number)
    return copied


def _run_again(
    model: PreTrainedModel, prompts: Prompts, sequences: Tensor, new: int, cache: Cache | None, wanted: Sequence[str]
) -> dict[str, Any]:
    """One more pass over the prompts and new tokens, but the last: hidden states, attentions, the last new logits."""
    inputs: dict[str, Any] = {
        "attention_mask": torch.cat([prompts.real, prompts.real.new_ones(len(sequences), new - 1)], dim=1).long(),
        "position_ids": extend_columns(prompts.positions, new - 1, step=1)[:, prompts.past :],
    }
    if prompts.token_types is not None:
        inputs["token_type_ids"] = extend_columns(prompts.token_types, new - 1, step=0)[:, prompts.past :]
    if prompts.embeddings is None:
        inputs["input_ids"] = sequences[:, -new - prompts.columns + prompts.past : -1]
    else:
        made = model.get_input_embeddings()(sequences[:, -new:-1].to(model.device))
        inputs["inputs_embeds"] = torch.cat([prompts.embeddings[:, prompts.past :].to(made.device), made], dim=1)
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    inputs |= {f"output_{name}": True for name in wanted} | {find_cache_name(type(model).forward): cache}
    known = signature(model.forward).parameters
    if "position_ids" not in known:  # there are no attention layers
        del inputs["position_ids"]
    if "logits_to_keep" in known:
        inputs["logits_to_keep"] = new
    with torch.no_grad():
        return model(**inputs, use_cache=cache is not None)


def _split(
    layers: Sequence[Tensor], first: int, new: int, use_cache: bool, is_attention: bool
) -> tuple[tuple[Tensor, ...], ...]:
    """One tuple of layers for each new token: the first has the `first` columns that were read, the others one each.

    Without a cache, transformers reads all columns for each token, and returns them.
    """
    before = layers[0].shape[-1] - (first + new - 1) if is_attention else 0

    def cut(states: Tensor, begin: int, end: int) -> Tensor:
        return states[..., begin:end, : before + end if is_attention else None]

    bounds = [(0, first), *(((end - 1) * use_cache, end) for end in range(first + 1, first + new))]
    return tuple(tuple(cut(states, *each) for states in layers) for each in bounds)
