"""One request's draft tree, grown best-first from the continuations that several sources name."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

from proposers.sources.source import Continuation, Source

LEARNED_WEIGHT = 30.0  # continuations of a kind that a source's own estimate counts for
Reason = tuple[int, Hashable]  # a source's number, and the kind of its continuation


class KindCounts:
    """How often continuations were right, by source and kind."""

    def __init__(self) -> None:
        self._counts: dict[Reason, list[int]] = {}  # right, and all

    def correct(self, reason: Reason, p: float) -> float:
        """A source's estimate, corrected by what became of such continuations."""
        counts = self._counts.get(reason)
        return p if counts is None else (counts[0] + LEARNED_WEIGHT * p) / (counts[1] + LEARNED_WEIGHT)

    def add(self, reason: Reason, right: bool) -> None:
        counts = self._counts.setdefault(reason, [0, 0])
        counts[0] += right
        counts[1] += 1


class Node:
    """A possible node of the tree. `number` is its place if it is in it, else -1."""

    __slots__ = ("best", "children", "depth", "named", "number", "p", "parent", "path", "share", "states", "token")

    def __init__(self, token: int, parent: Node | None) -> None:
        self.token, self.parent = token, parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.share = 0.0 if parent else 1.0  # the probability that it is right if its parent is ...
        self.best = -1  # ... by this source
        self.p = 1.0  # the probability that the whole path to it is right, while it is in the tree
        self.number = 0
        self.states: list[Any] = []
        self.named: list[tuple[int, Reason]] | None = None  # the tokens after it and why; None: no source was asked yet
        self.children: dict[int, Node] = {}  # those of them that are likely enough for the tree
        self.path = -1  # of a source that drafts level by level: the place in its last level


class GrowingTree:
    """A tree of the most likely nodes.

    Of several sources that name a token the most confident one is believed: they often have the same reason, so that
    adding up would be too confident.

    least: the smallest probability of a node. deepest: the depth below which there are no nodes. stop_ids: tokens after
    which there are none.
    """

    def __init__(
        self,
        root: int,
        request_id: int,
        sources: Sequence[Source],
        counts: KindCounts,
        least: float,
        deepest: int,
        stop_ids: Container[int] = (),
    ) -> None:
        self.sources, self.counts = sources, counts
        self.least, self.deepest, self.stop_ids = least, deepest, stop_ids
        self.root = Node(root, None)
        self.root.states = [source.start(request_id) for source in sources]
        self.nodes = [self.root]

    def grow(self, size: int) -> None:
        """Choose the nodes: the most likely ones, at most `size`."""
        self.nodes = []
        waiting: list[tuple[float, int, Node]] = []  # a heap: the most likely first, of equals the first one named
        named, node = 0, self.root
        while True:
            node.number = len(self.nodes)
            self.nodes.append(node)
            if len(self.nodes) == size:
                return
            if node.depth < self.deepest and node.token not in self.stop_ids:
                for child in self._ask(node).children.values():
                    child.number, child.p = -1, node.p * child.share
                    named += 1
                    heappush(waiting, (-child.p, named, child))
            if not waiting:
                return
            node = heappop(waiting)[2]

    def add(self, node: Node, source: int, continuations: Iterable[Continuation]) -> None:
        """Add the continuations of a node that a source names. `grow` chooses among them."""
        named, children, correct = self._ask(node).named, node.children, self.counts.correct
        assert named is not None
        for token, p, kind in continuations:
            reason = source, kind
            named.append((token, reason))
            p = correct(reason, p)
            if node.p * p < self.least:
                continue
            child = children.get(token)
            if child is None:
                child = children[token] = Node(token, node)
            if p > child.share:
                child.share, child.best = p, source

    def learn(self, tokens: Sequence[int]) -> list[tuple[Node, Node | None]]:
        """Count which continuations were right. tokens: those accepted after the root, then the bonus token.

        Returns the accepted nodes, root first, each with the child that was right, if it has that child.
        """
        node, accepted = self.root, []
        for token in tokens:
            for named, reason in self._ask(node).named or ():
                self.counts.add(reason, named == token)
            right = node.children.get(token)
            accepted.append((node, right))
            if right is None:
                break
            node = right
        return accepted

    def _ask(self, node: Node) -> Node:
        """The node, after all sources have been asked for its continuations."""
        if node.named is None:
            node.named = []
            if node.parent is not None:
                pairs = zip(self.sources, node.parent.states, strict=True)
                node.states = [source.follow(state, node.token) for source, state in pairs]
            for number, (source, state) in enumerate(zip(self.sources, node.states, strict=True)):
                self.add(node, number, source.continuations(state))
        return node
