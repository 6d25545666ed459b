"""One request's draft tree, grown best-first from the continuations that several sources name."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from typing import Any

from proposers.sources.source import Source

LEARNED_WEIGHT = 30.0  # continuations of a kind that a source's own estimate counts for


class KindCounts:
    """How often continuations were right, by source and kind."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, list[int]] = {}  # right, and all

    def correct(self, kind: Hashable, p: float) -> float:
        """A source's estimate, corrected by what became of such continuations."""
        counts = self._counts.get(kind)
        return p if counts is None else (counts[0] + LEARNED_WEIGHT * p) / (counts[1] + LEARNED_WEIGHT)

    def add(self, kind: Hashable, right: bool) -> None:
        counts = self._counts.setdefault(kind, [0, 0])
        counts[0] += right
        counts[1] += 1


class Node:
    """A node that may become a part of the tree; it is one as soon as it is asked for its continuations."""

    __slots__ = ("children", "number", "p", "parent", "sources", "states", "token")

    def __init__(self, token: int, p: float, parent: Node | None, sources: Sequence[int]) -> None:
        self.token, self.p, self.parent, self.sources = token, p, parent, sources
        self.number = -1  # in the tree
        self.states: list[Any] = []
        # By token: the probability that it is right after this node, and the sources and kinds that say so.
        self.children: dict[int, tuple[float, list[tuple[int, Hashable]]]] = {}


class GrowingTree:
    """A tree of the most likely paths.

    A node's probability is that of the whole path to it, by the kinds' counts. Of several sources that name a token the
    most confident one is believed: they often have the same reason, so that adding up would be too confident.
    """

    def __init__(self, root: int, request_id: int, sources: Sequence[Source], counts: KindCounts) -> None:
        self.sources, self.counts = sources, counts
        self.nodes: list[Node] = []
        self._waiting: list[tuple[float, int, Node]] = []  # a heap: the most likely first, then the first named
        self._named = 0
        node = Node(root, 1.0, None, ())
        node.states = [source.start(request_id) for source in sources]
        self._include(node)

    def grow(self, size: int, least: float) -> None:
        """Take in the most likely nodes until there are `size`, or the next one's probability is below `least`."""
        while self._waiting and len(self.nodes) < size and -self._waiting[0][0] >= least:
            node = heappop(self._waiting)[2]
            assert node.parent is not None
            pairs = zip(self.sources, node.parent.states, strict=True)
            node.states = [source.follow(state, node.token) for source, state in pairs]
            self._include(node)

    def learn(self, path: Sequence[int], bonus: int) -> None:
        """Count which continuations of the accepted nodes were right. path: their numbers, root first."""
        nodes = [self.nodes[number] for number in path]
        for node, token in zip(nodes, [*(node.token for node in nodes[1:]), bonus], strict=True):
            for named, (_, reasons) in node.children.items():
                for reason in reasons:
                    self.counts.add(reason, named == token)

    def _include(self, node: Node) -> None:
        node.number = len(self.nodes)
        self.nodes.append(node)
        children = node.children
        for index, (source, state) in enumerate(zip(self.sources, node.states, strict=True)):
            for token, p, kind in source.continuations(state):
                reason = index, kind
                p = self.counts.correct(reason, p)
                best, reasons = children.get(token, (0.0, []))
                reasons.append(reason)
                children[token] = max(best, p), reasons
        for token, (p, reasons) in children.items():
            self._named += 1
            child = Node(token, node.p * p, node, [index for index, _ in reasons])
            heappush(self._waiting, (-child.p, self._named, child))
