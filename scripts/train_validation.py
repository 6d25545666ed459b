"""Validation of a head in training: what it is worth in decoding, on prompts that it never saw."""

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


class Validator:
    """Decodes held-out prompts greedily with the head as it is, in trees of `NODES` nodes."""

    def __init__(self, target: Target, head: VocabularyHead, prompts: Sequence[Sequence[int]]) -> None:
        if not prompts:
            raise ValueError(
                "no prompt is held out for validation: the data needs ten at least, short enough for the model"
            )
        self.target, self.head, self.prompts = target, head, prompts

    def __call__(self) -> Validation:
        proposer = HEAD_PROPOSERS[self.head.kind](self.head, nodes=NODES)
        answers = generate(
            self.target, self.prompts, proposer, batch_size=BATCH, max_new_tokens=NEW_TOKENS, nodes=NODES
        )
        stats = Stats()
        for answer in answers:
            stats.add(answer.stats)
        reached = [stats.steps - len(answers), *stats.accepted_by_depth]  # nothing is guessed before the prompt is read
        return Validation(stats.tau, [deep / above for above, deep in pairwise(reached) if above])
