"""What a proposer is: it observes each step and proposes the next draft tree.

Shapes: B rows, N nodes, T committed tokens (padded to the longest row), V vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from decode.sampling import Sampling
from decode.tree import Tree

if TYPE_CHECKING:
    from decode.target import Target


@dataclass(frozen=True)
class Step:
    """One verified and accepted tree, for the rows that go on. The prompt is the first step: a chain, kept whole.

    `sequences[b]` ends with the bonus token, which is not in the KV cache yet and is the root of the next tree;
    `committed[b]` are the tokens that entered the cache in this step. `rows[b]` numbers the prompt, for good; rows
    leave the batch as they finish, and `kept[b]` is where a row stood in the step before.
    """

    first: bool  # the prompt's step; a proposer starts afresh
    rows: list[int]
    kept: list[int]
    sequences: list[list[int]]  # prompt and answer so far, bonus token included; not to be changed
    room: list[int]  # how many tokens each row may still get; guesses from that depth on are cut off
    committed: list[list[int]]
    path: list[list[int]]  # nodes of the verified tree that were accepted, root first
    tree: Tree
    logits: Tensor  # [B, N, V] of the tree; of the prompt only the last token's, [B, 1, V]
    features: Tensor | None  # [B, T, F] of the committed tokens, where the proposer named layers
    seconds: float  # that it took to verify and to judge the tree
    sampling: Sampling
    stop_ids: frozenset[int]  # an answer ends with any of these
    target: Target

    @property
    def bonus(self) -> list[int]:
        """The token after the committed ones, for each row."""
        return [sequence[-1] for sequence in self.sequences]


class Proposer(Protocol):
    """Anything that drafts. These three members are all that the loop knows of it.

    It may remember the text that it drafts for, so a proposer serves one stream at a time; streams that run side by
    side need one each. The loop calls it in torch's inference mode: whoever trains on what a step holds has to leave
    that mode, and to clone it.
    """

    @property
    def layers(self) -> Sequence[int]:
        """The target's hidden states that it wants as features (transformers' numbering); () for none."""
        ...

    def observe(self, step: Step) -> None:
        """Take note of a step."""
        ...

    def propose(self, budget: int) -> Tree:
        """At most `budget` nodes for each row of the last step, in its order; the root is the row's bonus token.

        Nodes that are too deep for a row's `Step.room` are cut off before the tree is verified, the others keep their
        order; the next step shows the tree that was verified.
        """
        ...


class Plain:
    """Proposes nothing but the root: plain decoding, the baseline of every speed-up."""

    layers: Sequence[int] = ()

    def observe(self, step: Step) -> None:
        self.roots = torch.tensor(step.bonus)[:, None]

    def propose(self, budget: int) -> Tree:
        return Tree.chain_of(self.roots, torch.ones(len(self.roots), dtype=torch.long))
