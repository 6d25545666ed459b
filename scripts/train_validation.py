"""Validation of a head in training: what it is worth in decoding, on prompts that it never saw."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from decode import Target, generate
from decode.stats import Stats
from proposers.hydra import HydraProposer
from proposers.medusa import MedusaProposer
from training.trainer import Validation

PROPOSERS = {"MedusaHead": MedusaProposer, "HydraHead": HydraProposer}
NODES = 16
NEW_TOKENS = 64


class Validator:
    """Decodes held-out prompts greedily with the head as it is, in trees of `NODES` nodes."""

    def __init__(self, target: Target, head: Any, prompts: Sequence[Sequence[int]]) -> None:
        if not prompts:
            raise ValueError("no prompt is held out for validation: the data has too few different prompts")
        self.target, self.head, self.prompts = target, head, prompts

    def __call__(self) -> Validation:
        proposer = PROPOSERS[type(self.head).__name__](self.head, nodes=NODES)
        answers = generate(self.target, self.prompts, proposer, max_new_tokens=NEW_TOKENS, nodes=NODES)
        stats = Stats()
        for answer in answers:
            stats.add(answer.stats)
        reached = [stats.steps, *stats.accepted_by_depth]
        acceptance = [deep / above for above, deep in pairwise(reached) if above]
        return Validation(stats.tau, acceptance)
