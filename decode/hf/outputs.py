"""What `generate` returns in addition to the tokens: scores, logits and the KV cache.

Shapes: B rows, C columns of the prompts, T new tokens of the longest row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import GenerateDecoderOnlyOutput

from decode.hf.kv_states import RowStates, write_cache
from decode.hf.session import PromptSession
from decode.models.compatibility import find_cache_name
from decode.tree import Tree


def make_output(
    session: PromptSession,
    sequences: Tensor,
    counts: Sequence[int],
    config: GenerationConfig,
    processors: LogitsProcessorList,
) -> GenerateDecoderOnlyOutput:
    """transformers' result for `sequences`. Row b has `counts[b]` new tokens, then padding.

    The cache in the prompts is filled, whether it is the user's or one that `generate` made.
    """
    prompts, new = session.prompts, max(counts)
    states, logits = _complete(session, sequences, counts)
    if prompts.cache is not None:
        write_cache(prompts.cache, states, prompts.past, prompts.columns + new - 1)
    output = GenerateDecoderOnlyOutput(sequences=sequences)
    setattr(output, find_cache_name(GenerateDecoderOnlyOutput), prompts.cache)
    if session.recording.logits:
        steps = torch.stack(logits, dim=1).to(sequences.device).unbind()  # T of [B, V]
        if config.output_scores:
            ends = range(sequences.shape[1] - new, sequences.shape[1])
            # As transformers does, so that the scores are the same where processors change the logits themselves.
            output.scores = tuple(processors(sequences[:, :end], step) for end, step in zip(ends, steps, strict=True))
        output.logits = steps if config.output_logits else None
    return output


def _complete(session: PromptSession, sequences: Tensor, counts: Sequence[int]) -> tuple[list[RowStates], list[Tensor]]:
    """The states of all columns but the last, and the logits [T, V] of new tokens, for each row.

    transformers goes on with padding in rows that end before the others; so does this.
    """
    prompts, new = session.prompts, max(counts)
    session.close()
    lengths = [prompts.columns - first + count - 1 for first, count in zip(prompts.first.tolist(), counts, strict=True)]
    logits = [torch.cat(session.logits[row])[:count] for row, count in enumerate(counts) if session.recording.logits]
    states = [_cut(session.states[row], length) for row, length in enumerate(lengths)]
    short = [row for row, count in enumerate(counts) if count < new]
    if short:
        rest = PromptSession(session.target, (), prompts.select(short), session.recording)
        rest.resume([states[row] for row in short], [lengths[row] for row in short])
        tokens = [sequences[row, counts[row] - new - 1 : -1].tolist() for row in short]
        rest.verify(Tree.chain(tokens))
        rest.keep([[*range(len(row))] for row in tokens])
        rest.close()
        for index, row in enumerate(short):
            states[row] = rest.states[index]
            if session.recording.logits:
                logits[row] = torch.cat([logits[row], *rest.logits[index]])
    return states, logits


def _cut(states: RowStates, length: int) -> RowStates:
    return [None if both is None else (both[0][:, :length], both[1][:, :length]) for both in states]
