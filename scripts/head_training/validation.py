"""Validation during training: decoding held-out prompts with the current head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from decode import Target, generate
from decode.stats import Stats
from heads.vocabulary import VocabularyHead
from proposers import HEAD_PROPOSERS
from training.trainer import Validation

NODES = 16
NEW_TOKENS = 64
BATCH = 16  # prompts at a time


def validate(target: Target, head: VocabularyHead, prompts: Sequence[Sequence[int]]) -> Validation:
    """Decode the prompts greedily with trees of `NODES` nodes."""
    proposer = HEAD_PROPOSERS[head.kind](head, nodes=NODES)
    answers = generate(target, prompts, proposer, batch_size=BATCH, max_new_tokens=NEW_TOKENS, nodes=NODES)
    stats = Stats()
    for answer in answers:
        stats.add(answer.stats)
    reached = [stats.steps - len(answers), *stats.accepted_by_depth]  # the prefill step drafts nothing
    return Validation(stats.tau, [deep / above for above, deep in pairwise(reached) if above])
