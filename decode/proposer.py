"""The Proposer protocol: a proposer sees each accepted step and proposes the next draft tree.

Shapes: B rows, N nodes, T committed tokens (padded to the longest row), V vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode.sampling import Sampling
from decode.target import Target
from decode.tree import Tree


@dataclass(frozen=True)
class Step:
    """One verified and accepted tree, for the rows that go on. The prefill is the first step of every batch.

    In the prefill each row commits its whole prompt, and `tree` is the prompt's last token alone. Rows leave the batch
    as they finish: `request_ids[b]` names the request of row b for good, `kept[b]` is its row in the step before.
    """

    is_prefill: bool  # a new batch begins: forget the last one
    request_ids: list[int]
    kept: list[int]
    sequences: list[list[int]]  # prompt and answer so far, bonus token included; read-only
    room: list[int]  # tokens each row may still get; deeper draft tokens are cut off
    committed: list[list[int]]  # tokens that entered the KV cache in this step
    path: list[list[int]]  # accepted nodes of the verified tree, root first
    tree: Tree
    logits: Tensor  # [B, N, V] of the tree
    features: Tensor | None  # [B, T, F] of the committed tokens, if the proposer names layers
    seconds: float  # spent on verifying and accepting the tree
    sampling: Sampling
    stop_ids: frozenset[int]  # tokens that end an answer
    target: Target

    @property
    def bonus(self) -> list[int]:
        """Each row's bonus token: chosen, not in the KV cache yet, and the root of the next tree."""
        return [sequence[-1] for sequence in self.sequences]


class Proposer(Protocol):
    """Anything that drafts. These two members are all that the loop needs.

    A proposer may keep state between steps, so it serves one stream at a time. The loop calls it in torch's inference
    mode. A proposer that sizes its trees by `Target.cost_curve` may set `adaptive = True`: the loop then measures the
    curve before the first token.
    """

    @property
    def layers(self) -> Sequence[int]:
        """The target's hidden states that it wants as features (transformers' numbering); () for none."""
        ...

    def propose(self, step: Step, budget: int) -> Tree:
        """A draft tree of at most `budget` nodes for each row of `step`; the root is the row's bonus token.

        Called exactly once a step. Nodes deeper than a row's `step.room` are cut off before the tree is verified; the
        others keep their order, and the next step carries the tree that was verified.
        """
        ...


class PlainProposer:
    """Proposes the root alone: plain decoding, the baseline of every speed-up."""

    layers: Sequence[int] = ()

    def propose(self, step: Step, budget: int) -> Tree:
        roots = torch.tensor(step.bonus)[:, None]
        return Tree.chain_of(roots, torch.ones(len(roots), dtype=torch.long))
