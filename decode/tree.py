"""Draft trees: several guesses at the next tokens that share their beginnings.

Shapes: B rows of the batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """A batch of draft trees; a chain is a tree.

    Node 0 is the root: the token that is chosen already but not yet in the KV cache. Every other node guesses the
    token after its parent. Parents come before their children. Rows with fewer nodes than N are padded at the tail;
    padding has parent -1 and is never accepted, never attended to and never kept.

    `q`, `sampled`: for drafts that were drawn at random. `sampled[b, i]` says that node i was drawn (without
    replacement among its siblings, in index order) from the law `q[b, parent]`; the others were chosen
    deterministically. `q` alone: all nodes were drawn. Neither: none was. `decode.rejection` says what a proposer
    of drawn nodes owes.
    `scores`: what the proposer thought of each node, for whoever merges or prunes trees. Verification ignores it.
    """

    tokens: Tensor  # [B, N] long
    parents: Tensor  # [B, N] long
    sizes: Tensor  # [B] long, the number of real nodes in a row
    height: int  # an upper bound of the depth of any node
    q: Tensor | None = None  # [B, N, V]
    sampled: Tensor | None = None  # [B, N] bool
    scores: Tensor | None = None  # [B, N] float
    is_chain: bool = False  # every row is known to be a chain

    @classmethod
    def chain(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tree:
        """One path a row: its root and then each token's successor. Rows may differ in length."""
        sizes = [len(row) for row in rows]
        width = max(sizes)
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
        return cls.chain_of(tokens, torch.tensor(sizes, device=device))

    @classmethod
    def chain_of(cls, tokens: Tensor, sizes: Tensor, q: Tensor | None = None) -> Tree:
        """Chains that are tensors already: `tokens` [B, N] padded at the tail, `sizes` [B]."""
        width = tokens.shape[1]
        column = torch.arange(width, device=tokens.device)
        parents = torch.where(column < sizes[:, None], column - 1, -1)
        tree = cls(tokens, parents, sizes, height=width - 1, q=q, is_chain=True)
        real = column < sizes[:, None]
        below = (column[:, None] >= column) & real[:, :, None]
        # A chain's ancestors are known without following its parents: a long prompt is one, too.
        tree.__dict__["ancestors"] = below | torch.eye(width, dtype=torch.bool, device=tokens.device)
        return tree

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tree:
        """Each row as its tokens and its parents, root first (parent -1); rows may differ in size."""
        width = max(len(nodes) for nodes, _ in rows)
        tokens = torch.tensor([[*nodes, *[0] * (width - len(nodes))] for nodes, _ in rows])
        parents = torch.tensor([[*parents, *[-1] * (width - len(parents))] for _, parents in rows])
        tree = cls(tokens, parents, torch.tensor([len(nodes) for nodes, _ in rows]), height=width - 1)
        return replace(tree, height=int(tree.depth.max()))

    @classmethod
    def best_first(cls, roots: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, budget: int) -> Tree:
        """The `budget` best nodes (root included) of a larger pool of candidates.

        roots [B]; tokens, parents, scores [B, M]: candidate j guesses `tokens[j]` after candidate `parents[j]`
        (-1: after the root), scores are the log of a path's product, so no child beats its parent. Equal scores go
        to the earlier candidate, which is never below the other: a child cannot be kept without its parent
        (a rounding tie does just that in half precision, hence float32).
        """
        batch, pool = tokens.shape
        kept = min(budget - 1, pool)
        order = torch.sort(scores.float(), dim=1, descending=True, stable=True).indices[:, :kept].sort(dim=1).values
        place = torch.full((batch, pool + 1), -1, device=tokens.device)  # candidate -> its node; last: the root
        place.scatter_(1, order, torch.arange(1, kept + 1, device=tokens.device).expand(batch, kept))
        place[:, -1] = 0
        chosen = place.gather(1, parents.gather(1, order) % (pool + 1))
        first = torch.full((batch, 1), -1, device=tokens.device)
        return cls(
            tokens=torch.cat([roots[:, None], tokens.gather(1, order)], dim=1),
            parents=torch.cat([first, chosen], dim=1),
            sizes=torch.full((batch,), kept + 1, device=tokens.device),
            height=kept,
            scores=torch.cat([torch.zeros_like(scores[:, :1]), scores.gather(1, order)], dim=1),
        )

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def real(self) -> Tensor:
        """Which nodes are no padding, [B, N] bool."""
        return torch.arange(self.width, device=self.tokens.device) < self.sizes[:, None]

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, N, N] bool: `ancestors[b, i, j]` where j lies on the path from the root to i, i itself included."""
        nodes = torch.arange(self.width, device=self.tokens.device)
        reach = (self.parents[:, :, None] == nodes) | (nodes[:, None] == nodes)
        for _ in range(max(self.height - 1, 0).bit_length()):  # each squaring doubles how far a node looks up
            reach = (reach.float() @ reach.float()) > 0
        return reach

    @cached_property
    def depth(self) -> Tensor:
        """[B, N] long: 0 at the root."""
        return self.ancestors.sum(dim=2) - 1

    def to(self, device: torch.device) -> Tree:
        """The same trees on another device; itself where it is there already."""
        if self.tokens.device == device:
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))  # no wait for the GPU

    def select(self, rows: Sequence[int]) -> Tree:
        """The trees of some rows only."""
        return self._map(lambda tensor: tensor[rows])

    def cut(self, depths: Sequence[int]) -> Tree:
        """Only the nodes that are at most `depths[b]` deep in row b, in their order; itself where all are."""
        if min(depths) >= self.height:
            return self
        device = self.tokens.device
        deepest = torch.tensor(depths).to(device, non_blocking=device.type == "cuda")  # no wait for the GPU
        kept = self.real & (self.depth <= deepest[:, None])  # [B, N]
        sizes = kept.sum(dim=1)
        # A narrower tree is a cheaper pass, but a GPU would have to be waited for to tell how narrow.
        width = int(sizes.max()) if device.type == "cpu" else self.width
        order = torch.sort(kept.int(), dim=1, descending=True, stable=True).indices[:, :width]  # what is kept, first
        place = kept.cumsum(dim=1) - 1  # a kept node's new number
        parents = place.gather(1, self.parents.gather(1, order).clamp(min=0))
        inner = torch.arange(width, device=device) < sizes[:, None]
        inner[:, 0] = False  # the root has no parent, nor has padding
        return replace(
            self,
            tokens=self.tokens.gather(1, order),
            parents=torch.where(inner, parents, -1),
            sizes=sizes,
            height=min(self.height, max(depths), width - 1),
            q=None if self.q is None else self.q.gather(1, order[:, :, None].expand(-1, -1, self.q.shape[2])),
            sampled=None if self.sampled is None else self.sampled.gather(1, order),
            scores=None if self.scores is None else self.scores.gather(1, order),
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> Tree:
        """A tree with all its tensors changed, those already derived from its fields included."""
        tree = copy(self)
        tree.__dict__.update({name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)})
        return tree

    def check(self, batch: int, budget: int, vocabulary: int) -> None:
        """Raise ValueError where these are not trees that a proposer may hand in. Reads values: call it on the CPU."""
        if self.tokens.shape != self.parents.shape or self.tokens.shape[0] != batch or self.sizes.shape != (batch,):
            raise ValueError(
                f"a tree for {batch} rows has tokens {tuple(self.tokens.shape)}, parents {tuple(self.parents.shape)} "
                f"and sizes {tuple(self.sizes.shape)}; expected [{batch}, N], [{batch}, N] and [{batch}]"
            )
        if not 1 <= int(self.sizes.min()) <= int(self.sizes.max()) <= min(budget, self.width):
            raise ValueError(f"tree sizes {self.sizes.tolist()} are not between 1 and the budget of {budget} nodes")
        nodes = torch.arange(self.width)
        inner = self.real & (nodes > 0)
        if bool(((self.parents >= nodes) | (self.parents < 0))[inner].any()) or bool((self.parents[:, 0] != -1).any()):
            raise ValueError("a tree's root must have parent -1, every other node a parent before itself")
        if bool((self.depth != self.depth.gather(1, self.parents.clamp(min=0)) + 1)[inner].any()):
            raise ValueError(f"a tree is deeper than the height of {self.height} that it names")
        if self.is_chain and bool((self.parents != nodes - 1)[inner].any()):
            raise ValueError("a tree that is called a chain must have each node behind the one before it")
        drafted = self.tokens[self.real]
        if int(drafted.min()) < 0 or int(drafted.max()) >= vocabulary:
            raise ValueError(
                f"a tree drafts token {int(drafted.min())} or {int(drafted.max())}, outside the vocabulary "
                f"of {vocabulary}"
            )
        if self.sampled is not None and self.q is None:
            raise ValueError("a tree with sampled nodes carries the law `q` that they were drawn from")
