"""One draft tree from several sources: the most likely nodes of all of them, best-first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import perf_counter

import torch

from decode import Step, Tree
from decode.devices.transfer import copy_packed, read
from proposers.draft_budget import DraftBudget, DrafterWorth
from proposers.search import ScoredDrafter
from proposers.sources import SOURCES, AnswerStore, Source, StoredSource
from proposers.sources.growing_tree import GrowingNode, GrowingTree, Kinds, Trust
from proposers.sources.source import Named
from proposers.tree_proposer import TreeProposer

NEWS = 0.3  # the share of a drafter's levels that name the right token better than the others, before any is seen
MEMORY = 0.97  # weight of what was learned before, per accepted node
PARTS = 10  # a drafter's probabilities are counted alike in so many parts


class MergedProposer:
    """Drafts trees of the most likely continuations that any of its sources names.

    sources: None takes one of each of `SOURCES`, which need no training.
    drafter: a proposer with a trained head or a draft model, which continues the tree level by level where that is
    worth the time.
    store: answers of earlier requests that are a further source; those of this proposer's streams are added.
    nodes: the size of every tree, root included, unless the sources or the budget give less. None adapts it to this
    device, down to no draft at all.
    accepted_by_source: accepted draft tokens by the name of the source that was most confident of them.

    Raises ValueError for a size below 1.
    """

    def __init__(
        self,
        sources: Sequence[Source] | None = None,
        drafter: TreeProposer | None = None,
        *,
        store: AnswerStore | None = None,
        nodes: int | None = None,
    ) -> None:
        if nodes is not None and nodes < 1:
            raise ValueError(f"nodes is {nodes}; a tree has at least its root")
        self.sources = [make() for make in SOURCES.values()] if sources is None else list(sources)
        if store is not None:
            self.sources.append(StoredSource(store))
        self.drafter, self.nodes, self.adaptive = drafter, nodes, nodes is None
        self.layers = () if drafter is None else drafter.layers
        self.fuse, self.begin = getattr(drafter, "fuse", None), getattr(drafter, "begin", None)
        self.draft_budget = DraftBudget() if drafter is None else drafter.draft_budget
        self._drafter_worth = DrafterWorth()
        self._names = [source.name for source in self.sources] + ([] if drafter is None else [drafter.name])
        self.counts: list[Kinds] = [{} for _ in self._names]
        self._trusts = [Trust(source.usual_trust) for source in self.sources] + [Trust(1.0)] * (drafter is not None)
        self.accepted_by_source = dict.fromkeys(self._names, 0)
        self._news = NEWS
        self._trees: dict[int, GrowingTree] = {}

    def renew(self) -> MergedProposer:
        """The same proposer with nothing learned; a store of answers stays as it is."""
        sources = [source.renew() for source in self.sources]
        return MergedProposer(sources, self.drafter and self.drafter.renew(), nodes=self.nodes)

    def keep_answers(self) -> None:
        """Add the last stream's answers to the store. The next stream would do it."""
        for source in self.sources:
            if isinstance(source, StoredSource):
                source.keep_answers()

    def propose(self, step: Step, budget: int) -> Tree:
        self._observe(step)
        most, least = min(budget, self.nodes or budget), 0.0
        if self.adaptive:
            self.draft_budget.observe(step)
            least = self.draft_budget.least_worth
        trees = [
            GrowingTree(each, self.sources, self.counts, self._trusts, least, step.target) for each in step.requests
        ]
        self._trees = dict(zip(step.request_ids, trees, strict=True))
        if self.drafter is None or most == 1:
            (expected, grown), levels = self._grow(trees, most), 0
        else:
            expected, grown, levels = self._draft_levels(self.drafter, step, trees, most)
        if self.adaptive:
            grown = grown[: self.draft_budget.choose_growth(expected, levels)]
        taken = Counter(row for rows in grown for row in rows)
        for row, tree in enumerate(trees):
            del tree.nodes[1 + taken[row] :]
        tokens = [[node.token for node in tree.nodes] for tree in trees]
        parents = [[-1 if node.parent is None else node.parent.number for node in tree.nodes] for tree in trees]
        return Tree.of_rows([*zip(tokens, parents, strict=True)])

    def _grow(self, trees: Sequence[GrowingTree], most: int) -> tuple[list[float], list[Sequence[int]]]:
        """Let the trees grow to at most `most` nodes each, as long as more may be worth their time.

        Where they share a budget, the tree with the most likely node grows; else all of them do. Returns the tokens
        that they should have accepted on average after growing 0, 1, ... times, and the rows that grew each time.
        """
        growths = [tree.grow(most) for tree in trees]
        coming = [next(each, 0.0) for each in growths]  # the probability of each row's next node
        budget, expected, grown, rows = self.draft_budget, [0.0], list[Sequence[int]](), range(len(trees))
        shares = self.adaptive and budget.unit < 1
        while True:
            if shares:
                rows = range(best := coming.index(max(coming)), best + 1)
            p = sum(coming[row] for row in rows) / len(trees)
            nodes = 1 + budget.unit * len(grown)
            if p == 0 or (self.adaptive and not budget.is_worth_more(nodes, p / budget.unit)):
                return expected, grown
            for row in rows:
                coming[row] = next(growths[row], 0.0)
            expected.append(expected[-1] + p)
            grown.append(rows)

    def _observe(self, step: Step) -> None:
        """Learn from the last trees, and let the sources read on after that: the trees ask them about the old text."""
        for trust in self._trusts:
            trust.fade()
        stayed = zip(step.request_ids, step.sequences, step.path, step.stayed, strict=False)  # the first rows
        for request_id, sequence, path, _ in stayed:
            self._learn(self._trees[request_id].learn(sequence[-len(path) :]), len(path) - 1)
        for source in self.sources:
            source.observe(step)
        if self.drafter is not None:
            self.drafter.observe(step)

    def finish(self, request_id: int, tokens: Sequence[int], accepted: int) -> None:
        """Learn from a request's last tree. Arguments as in `decode.Proposer`."""
        self._learn(self._trees.pop(request_id).learn(tokens), accepted)

    def credit(self, request_id: int, tokens: Sequence[int]) -> list[str]:
        """The names of the sources that were most confident of accepted tokens. Arguments as in `decode.Proposer`."""
        return [self._names[node.best] for node in self._trees[request_id].follow(tokens)]

    def _learn(self, followed: Sequence[tuple[GrowingNode, int]], accepted: int) -> None:
        """Learn whose tokens were accepted, and how often the drafter's continuations are news.

        followed: the nodes on the text's path and the source of each next token; of these, `accepted` were drafted.
        """
        for place, (node, source) in enumerate(followed):
            if place < accepted and source >= 0:
                self.accepted_by_source[self._names[source]] += 1
            if node.path >= 0:
                self._news = MEMORY * self._news + (1 - MEMORY) * (source == len(self.sources))

    @torch.no_grad()
    def _draft_levels(
        self, drafter: TreeProposer, step: Step, trees: Sequence[GrowingTree], most: int
    ) -> tuple[list[float], list[Sequence[int]], int]:
        """Let the drafter continue the trees as long as that is worth it. Returns what `_grow` does, and its passes.

        One that drafts all levels in one pass is asked once whether that is worth it.
        """
        begun, level, (expected, grown) = perf_counter(), 0, self._grow(trees, most)
        deepest, paths = min(drafter.depth, most - 1, max(2, *step.room) - 1), [[tree.root] for tree in trees]
        budget, unknown = self.draft_budget, sum(tree.root.unknown for tree in trees) / len(trees)
        costs, gain, unread = budget.rate * budget.level_time, 0.0, drafter.unread
        if self.adaptive:
            if not self._drafter_worth.is_worth_it(unknown, costs, budget.node_cost, unread, max(step.room)):
                return expected, grown, 0
            gain = budget.find_gain(expected)
        while level < deepest and any(paths):
            if level == 0:
                scored = drafter.start_scored(drafter.read_inputs(step, deepest), step.target, step.samplings)
            elif drafter.levelwise and self.adaptive:  # by how often it knows better than the other sources
                right = (self._news * node.p for row in paths for node in row)
                if not budget.is_worth_a_level(right, len(paths)):
                    break
            found = continue_paths(scored, level, paths, drafter.ranks, drafter.find_device(step.target))
            for tree, row, continuations in zip(trees, paths, found, strict=True):
                for place, (node, named) in enumerate(zip(row, continuations, strict=False)):
                    node.path = place
                    tree.add(node, len(self.sources), named)
            expected, grown = self._grow(trees, most)
            level += 1
            continued = (
                [node for node in tree.nodes if node.depth == level and node.parent and node.parent.path >= 0]
                for tree in trees
            )
            paths = [nodes[: drafter.width] for nodes in continued]  # the most likely ones
        passes = level if drafter.levelwise else min(level, 1)
        if passes:
            budget.take_drafting_time(perf_counter() - begun, passes + unread)
            self._drafter_worth.learn(unknown, budget.find_gain(expected) - gain, passes, costs)
        return expected, grown, passes


def continue_paths(
    drafter: ScoredDrafter, level: int, paths: Sequence[Sequence[GrowingNode]], ranks: int, device: torch.device
) -> list[list[list[Named]]]:
    """A drafter's continuations by its calibrated probabilities, by row and path. NaN counts as 0.

    paths: the nodes at their ends, which any source may have named; at level 0 the roots. At other levels the last call
    continued their parents, each at the place `Node.path` of its row.
    """
    width = max(map(len, paths))
    rows = [[*row, *[None] * (width - len(row))] for row in paths]  # padded
    numbers = {
        "p": torch.tensor([[node.p if node else 1.0 for node in row] for row in rows]),
        "parents": torch.tensor([[node.parent.path if node and node.parent else 0 for node in row] for row in rows]),
        "tokens": torch.tensor([[node.token if node else 0 for node in row] for row in rows]),
    }
    numbers = copy_packed(numbers, device)
    scores = numbers["p"].log()
    if level:
        drafter.inner.extend(numbers["parents"], numbers["tokens"])
    drafted, longer = drafter.name_next(level, ranks, scores)
    found = (longer - scores[:, :, None]).double().exp().nan_to_num(nan=0.0)  # by row, path and rank
    both = read(torch.stack([drafted, found.view(torch.long)]))  # a GPU is waited for once
    drafted, p = both[0], both[1].view(torch.double)
    return [
        [
            [(token, each, (level, rank, int(each * PARTS))) for rank, (token, each) in enumerate(pairs)]
            for pairs in (zip(*path, strict=True) for path in zip(*row, strict=True))
        ]
        for row in zip(drafted.tolist(), p.tolist(), strict=True)
    ]
