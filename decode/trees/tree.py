"""Draft trees: several continuations of a text that share their first tokens.

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from decode.devices.transfer import copy_packed, waits


@dataclass(frozen=True)
class Tree:
    """A batch of draft trees; a chain is a tree.

    Node 0 is the root: the last bonus token, which is not in the KV cache yet. Every other node drafts a token after
    its parent, and parents come before their children. Rows with fewer than N nodes are padded at the end; padding has
    parent -1 and is never attended to or accepted.

    tokens [B, N] long: each node's token id. parents [B, N] long: the index of each node's parent.
    sizes [B] long: the number of real nodes in a row. height: no node is deeper than this.
    q [B, N, V]: for sampled drafts, which are chains: node i + 1 was sampled from the probabilities `q[b, i]` (see
    `decode.trees.rejection`). Without q the draft is deterministic.
    scores [B, N] float: the proposer's, for pruning or inspection. Verification ignores them.
    is_chain: every row is known to be a chain.
    wrong [B] bool: trees found invalid on a GPU; see `mend`.
    """

    tokens: Tensor
    parents: Tensor
    sizes: Tensor
    height: int
    q: Tensor | None = None
    scores: Tensor | None = None
    is_chain: bool = False
    wrong: Tensor | None = None

    @classmethod
    def chain(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tree:
        """One chain per row, from the row's tokens, root first. Rows may differ in length."""
        sizes = [len(row) for row in rows]
        width = max(sizes)
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
        return cls.chain_of(tokens, torch.tensor(sizes, device=device))

    @classmethod
    def chain_of(cls, tokens: Tensor, sizes: Tensor, q: Tensor | None = None) -> Tree:
        """Chains from tensors: `tokens` [B, N], padded at the end, and `sizes` [B]."""
        width = tokens.shape[1]
        column = torch.arange(width, device=tokens.device)
        real = column < sizes[:, None]
        tree = cls(tokens, torch.where(real, column - 1, -1), sizes, height=width - 1, q=q, is_chain=True)
        tree.__dict__["depth"] = torch.where(real, column, 0)  # a long prompt is a chain, and needs no ancestors
        return tree

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tree:
        """A tree from each row's tokens and parents, root first (its parent is -1). Rows may differ in size."""
        sizes = [len(tokens) for tokens, _ in rows]
        width = max(sizes)
        tokens = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens, _ in rows])
        parents = torch.tensor([[*parents, *[-1] * (width - len(parents))] for _, parents in rows])
        return cls(tokens, parents, torch.tensor(sizes), height=width - 1)

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def real(self) -> Tensor:
        """Which nodes are not padding, [B, N] bool."""
        return torch.arange(self.width, device=self.tokens.device) < self.sizes[:, None]

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, N, N] bool: `ancestors[b, i, j]` if j lies on the path from the root to i, i included."""
        if self.is_chain:
            nodes = torch.arange(self.width, device=self.tokens.device)
            return ((nodes[:, None] >= nodes) & self.real[:, :, None]) | (nodes[:, None] == nodes)
        return find_ancestors(self.parents, self.height)

    @cached_property
    def depth(self) -> Tensor:
        """[B, N] long: 0 at the root."""
        return self.ancestors.sum(dim=2) - 1

    def to(self, device: torch.device) -> Tree:
        """The same trees on a device."""
        if self.tokens.device == device:
            return self
        if not waits(self.tokens):
            return self.with_tensors(copy_packed(self.tensors(), device))
        return self.with_tensors({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def select(self, rows: Tensor) -> Tree:
        """The trees of some rows only, in the order of this tensor."""
        return self.with_tensors({name: tensor[rows] for name, tensor in self.tensors().items()})

    def first(self, nodes: int) -> Tree:
        """The trees of the first nodes, at most so many of each."""
        return replace(
            self,
            tokens=self.tokens[:, :nodes],
            parents=self.parents[:, :nodes],
            sizes=self.sizes.clamp(max=nodes),
            height=min(self.height, nodes - 1),
            q=None if self.q is None else self.q[:, :nodes],
            scores=None if self.scores is None else self.scores[:, :nodes],
        )

    def join(self, other: Tree) -> Tree:
        """The trees of two batches as one, without `q` and scores."""
        width, trees = max(self.width, other.width), (self, other.to(self.tokens.device))
        tokens, parents = (
            torch.cat([nn.functional.pad(getattr(tree, name), (0, width - tree.width), value=value) for tree in trees])
            for name, value in (("tokens", 0), ("parents", -1))
        )
        sizes, height = torch.cat([tree.sizes for tree in trees]), max(self.height, other.height)
        return Tree(tokens, parents, sizes, height, is_chain=self.is_chain and other.is_chain)

    def limit(self, nodes: Sequence[int]) -> Tree:
        """Only the first `nodes[b]` nodes of row b."""
        limits = copy_packed({"nodes": torch.tensor(nodes)}, self.tokens.device)["nodes"]
        tree = self.first(max(nodes))
        sizes = tree.sizes.minimum(limits)
        real = torch.arange(tree.width, device=sizes.device) < sizes[:, None]
        return replace(tree, sizes=sizes, parents=torch.where(real, tree.parents, -1))

    def cut(self, depths: Sequence[int], limits: Tensor | None = None) -> Tree:
        """Only the nodes at most `depths[b]` deep in row b, in their order. limits: the depths on the tree's device."""
        if min(depths) >= self.height:
            return self
        limits = torch.tensor(depths).to(self.tokens.device) if limits is None else limits
        kept = self.keep(self.real & (self.depth <= limits[:, None]))
        return replace(kept, height=min(kept.height, max(depths)))

    def keep(self, inside: Tensor) -> Tree:
        """Only some nodes [B, N] bool, in their order. The parent of each must be among them."""
        device, sizes = self.tokens.device, inside.sum(dim=1)
        # A narrower tree is a shorter pass, but on a GPU reading its width would synchronize.
        width = self.width if waits(sizes) else int(sizes.max())
        order = torch.sort(inside.int(), dim=1, descending=True, stable=True).indices[:, :width]
        node = inside.cumsum(dim=1) - 1  # [B, N] new indices
        parents = node.gather(1, self.parents.gather(1, order).clamp(min=0))
        has_parent = torch.arange(width, device=device) < sizes[:, None]
        has_parent[:, 0] = False
        return replace(
            self,
            tokens=self.tokens.gather(1, order),
            parents=torch.where(has_parent, parents, -1),
            sizes=sizes,
            height=min(self.height, width - 1),
            q=None if self.q is None else self.q.take_along_dim(order[:, :, None], dim=1),
            scores=None if self.scores is None else self.scores.gather(1, order),
        )

    def best_chains(self) -> Tree:
        """Of each row the path of first children: proposers add the most likely nodes first."""
        if self.is_chain:
            return self
        rows = []
        for tokens, parents, size in zip(self.tokens.tolist(), self.parents.tolist(), self.sizes.tolist(), strict=True):
            path = [0]
            for node in range(1, size):
                if parents[node] == path[-1]:
                    path.append(node)
            rows.append([tokens[node] for node in path])
        return Tree.chain(rows, self.tokens.device)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, cached properties included."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Tree:
        """The same trees with other tensors of these names."""
        tree = copy(self)
        tree.__dict__.update(tensors)
        return tree

    def check(self, budget: int, vocabulary: int, roots: Sequence[int] | None = None) -> None:
        """Raise ValueError if these are not valid trees; `check_shapes` comes first. On a GPU this would synchronize.

        Messages begin with what is there, and say what is right. roots: the token that each row's tree must begin with.
        """
        if not 1 <= int(self.sizes.min()) <= int(self.sizes.max()) <= min(budget, self.width):
            raise ValueError(
                f"trees of {self.sizes.tolist()} nodes; a tree has its root and at most the budget of {budget} nodes, "
                f"and its tensors have {self.width} columns"
            )
        rows = zip(self.tokens.tolist(), self.parents.tolist(), self.sizes.tolist(), strict=True)
        for tokens, parents, size in rows:  # fewer operations than on tensors, for trees are small
            depths = [0]
            for node, parent in enumerate(parents[1:size], start=1):
                if not 0 <= parent < node:
                    raise ValueError(WRONG_PARENTS)
                if self.is_chain and parent != node - 1:
                    raise ValueError(
                        "a tree with is_chain=True that is no chain; it must be a chain: each node's parent is the "
                        "node before"
                    )
                depths.append(depths[parent] + 1)
            if max(depths) > self.height:
                raise ValueError(f"a tree that is deeper than its height of {self.height}; no node may be")
            if wrong := [token for token in tokens[:size] if not 0 <= token < vocabulary]:
                raise ValueError(f"draft token {min(wrong)}, which is outside the vocabulary of {vocabulary}")
            if any(parent != -1 for parent in (parents[0], *parents[size:])):
                raise ValueError(WRONG_PARENTS)
        if roots is not None and (given := self.tokens[:, 0].tolist()) != [*roots]:
            raise ValueError(f"trees with the roots {given}; each must be its row's bonus token, here {[*roots]}")

    def mend(self, roots: Tensor, budget: int, vocabulary: int) -> Tree:
        """The trees with their faults mended, and `wrong` [B] marking the rows that had one. Never synchronizes.

        A wrong index would end the process on a GPU. The loop reads `wrong` with the accepted path and then raises what
        `check` says. roots [B]: the bonus tokens, which replace the trees' own roots.
        """
        known = vars(self).get("ancestors") if self.is_chain else None  # what is known of a chain stays true
        limit = min(budget, self.width, self.height + 1 if self.is_chain else self.width)
        node = torch.arange(self.width, device=self.tokens.device)
        sizes = self.sizes.clamp(1, limit)
        real = node < sizes[:, None]
        tokens = torch.where(node > 0, self.tokens.clamp(0, vocabulary - 1), roots[:, None])
        parents = torch.where(real, node - 1 if self.is_chain else self.parents.clamp(min=0).minimum(node - 1), -1)
        ancestors = find_ancestors(parents, self.height) if known is None else known
        depth = (ancestors.sum(dim=2) - 1).clamp(max=self.height)
        too_deep = depth != depth.gather(1, parents.clamp(min=0)) + 1
        wrong = (real & (node > 0) & ((tokens != self.tokens) | too_deep)) | (parents != self.parents)
        return self.with_tensors(
            {
                "tokens": tokens,
                "parents": parents,
                "sizes": sizes,
                "real": real,
                "ancestors": ancestors,
                "depth": depth,
                "wrong": wrong.any(dim=1) | (sizes != self.sizes),
            }
        )

    def check_shapes(self, batch: int, vocabulary: int) -> None:
        """Raise ValueError if the tensors do not fit together. Never synchronizes. Messages: see `check`."""
        for name, letters in (("tokens", "B, N"), ("parents", "B, N"), ("sizes", "B")):
            tensor: Any = getattr(self, name)
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.long:
                kind = str(tensor.dtype) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
                raise ValueError(f"a tree whose {name} are {kind}; they are a tensor [{letters}] of torch.int64")
        shape = self.tokens.shape
        fits = len(shape) == 2 and shape[0] == batch and shape[1] > 0
        if not fits or shape != self.parents.shape or self.sizes.shape != (batch,):
            raise ValueError(
                f"a tree with tokens {[*shape]}, parents {[*self.parents.shape]} and sizes {[*self.sizes.shape]}; "
                f"for {batch} rows, they are [{batch}, N], [{batch}, N] and [{batch}]"
            )
        if isinstance(self.height, bool) or not isinstance(self.height, int) or self.height < 0:
            raise ValueError(f"a tree of height {self.height!r}; it is the greatest depth of a node, a whole number")
        devices = {str(tensor.device) for tensor in self.tensors().values()}
        if len(devices) > 1 or "meta" in devices:
            raise ValueError(
                f"a tree with tensors on {', '.join(sorted(devices))}; all must be on the CPU or on one GPU"
            )
        if self.q is not None and not self.is_chain:
            raise ValueError(
                "a tree with `q`, which is a sampled draft and must be a chain: make it with Tree.chain_of"
            )
        if self.q is not None and (self.q.shape != (*shape, vocabulary) or not self.q.is_floating_point()):
            raise ValueError(
                f"a tree whose q is {[*self.q.shape]} of {self.q.dtype}; for these tokens, it is "
                f"{[*shape, vocabulary]} of a floating-point dtype: probabilities after each node"
            )


WRONG_PARENTS = (
    "a tree with wrong parents; root and padding must have parent -1, every other node a parent before itself"
)


def find_ancestors(parents: Tensor, height: int) -> Tensor:
    """`Tree.ancestors` for parents [B, N], if no node is deeper than `height`."""
    nodes = torch.arange(parents.shape[1], device=parents.device)
    above = torch.where(parents < 0, nodes, parents)  # the root and padding stay where they are
    ancestors = (above[:, :, None] == nodes) | (nodes[:, None] == nodes)
    for _ in range(height.bit_length() - 1):  # each round doubles the number of levels above that are covered
        above = above.gather(1, above)
        ancestors = ancestors | ancestors.gather(1, above[:, :, None].expand_as(ancestors))
    return ancestors
