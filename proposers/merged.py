"""One draft tree from several sources: the most likely nodes of all of them, best-first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from decode import Step, Tree
from proposers.draft_budget import DraftBudget
from proposers.growing_tree import GrowingTree, KindCounts
from proposers.sources import RecyclingSource, Source, SuffixSource


class MergedProposer:
    """Drafts trees of the most likely continuations that any of its sources names.

    sources: None takes those that need no training: `SuffixSource` and `RecyclingSource`.
    nodes: the size of every tree, root included, unless the sources or the budget give less. None adapts it to this
    device, down to no draft at all.

    Raises ValueError without sources, and for a size below 1.
    """

    def __init__(self, sources: Sequence[Source] | None = None, *, nodes: int | None = None) -> None:
        self.sources = [SuffixSource(), RecyclingSource()] if sources is None else list(sources)
        if not self.sources:
            raise ValueError("a merged tree needs at least one source")
        if nodes is not None and nodes < 1:
            raise ValueError(f"nodes is {nodes}; a tree has at least its root")
        self.nodes, self.adaptive = nodes, nodes is None
        self.layers = sorted({layer for source in self.sources for layer in source.layers})
        self.counts, self.draft_budget = KindCounts(), DraftBudget()
        self._trees: dict[int, GrowingTree] = {}

    def propose(self, step: Step, budget: int) -> Tree:
        self._observe(step)
        most, least = min(budget, self.nodes or budget), 0.0
        if self.adaptive:
            self.draft_budget.observe(step)
            least = self.draft_budget.least_worth
        trees = [
            GrowingTree(root, request_id, self.sources, self.counts)
            for root, request_id in zip(step.bonus, step.request_ids, strict=True)
        ]
        for tree in trees:
            tree.grow(most, least)
        self._trees = dict(zip(step.request_ids, trees, strict=True))
        size = self.draft_budget.choose_size(expect_accepted(trees), levels=0) if self.adaptive else most
        return make_tree(trees, size)

    def _observe(self, step: Step) -> None:
        """Learn from the last trees. Nodes that were cut off were never accepted."""
        for source in self.sources:
            source.observe(step)
        if not step.is_prefill:
            for request_id, path, bonus in zip(step.request_ids, step.path, step.bonus, strict=True):
                self._trees[request_id].learn(path, bonus)


def expect_accepted(trees: Sequence[GrowingTree]) -> list[float]:
    """The tokens that trees of 1, 2, ... nodes should have accepted, on average over the rows."""
    sizes = range(1, max(len(tree.nodes) for tree in trees))
    sums = [sum(tree.nodes[size].p for tree in trees if size < len(tree.nodes)) for size in sizes]
    return list(accumulate((p / len(trees) for p in sums), initial=0.0))


def make_tree(trees: Sequence[GrowingTree], size: int) -> Tree:
    """The first `size` nodes of each row's tree."""
    rows = [tree.nodes[:size] for tree in trees]
    width = max(map(len, rows))
    tokens = [[*(node.token for node in row), *[0] * (width - len(row))] for row in rows]
    parents = [
        [*(-1 if node.parent is None else node.parent.number for node in row), *[-1] * (width - len(row))]
        for row in rows
    ]
    sizes = torch.tensor([len(row) for row in rows])
    return Tree(torch.tensor(tokens), torch.tensor(parents), sizes, height=width - 1)
