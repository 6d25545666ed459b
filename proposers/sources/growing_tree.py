"""One request's draft tree, grown best-first from the continuations that several sources name."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any, TypeAlias

from decode.models.stock_model import StockModel
from proposers.sources.source import Named, Source

LEARNED_WEIGHT = 30.0  # continuations of a kind that a source's own estimate counts for


Kinds: TypeAlias = dict[Hashable, list[int]]  # by kind: how many of a source's continuations were right, and all


def correct(p: float, counts: Sequence[int]) -> float:
    """A source's estimate, corrected by what became of such continuations."""
    return (counts[0] + LEARNED_WEIGHT * p) / (counts[1] + LEARNED_WEIGHT)


class Node:
    """A node of the tree."""

    __slots__ = ("best", "depth", "likely", "named", "number", "p", "parent", "path", "serial", "states", "token")

    def __init__(self, token: int, parent: Node | None, serial: int) -> None:
        self.token, self.parent, self.serial = token, parent, serial
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.best = -1  # the source that is most confident of it
        self.p = 1.0  # the probability that the whole path to it is right
        self.number = 0  # its place in the tree
        self.states: list[Any] = []
        self.named: list[tuple[int, Iterable[Named]]] | None = None  # by source; None: none was asked yet
        self.likely: dict[int, tuple[float, int]] = {}  # by next token: its probability after this node, and `best`
        self.path = -1  # of a source that drafts level by level: the place in its last level


class GrowingTree:
    """A tree of the most likely nodes, which grows by a node at a time.

    Of several sources that name a token the most confident one is believed: they often have the same reason, so that
    adding up would be too confident. Nodes do not refer to their children, so that no garbage collection is needed.

    least: the smallest probability of a node. deepest: the depth below which there are no nodes. stop_ids: tokens after
    which there are none. target: tokens outside of its vocabulary, as of a damaged store, are ignored; if it
    keeps a recurrent state, the tree is a chain.
    """

    def __init__(
        self,
        root: int,
        request_id: int,
        sources: Sequence[Source],
        counts: Sequence[Kinds],
        least: float,
        deepest: int,
        stop_ids: Container[int] = (),
        target: StockModel | None = None,
    ) -> None:
        self.sources, self.counts = sources, counts
        self.least, self.deepest, self.stop_ids = least, deepest, stop_ids
        self.vocabulary = inf if target is None else target.vocabulary
        self.is_chain = target is not None and target.is_recurrent
        self.root = Node(root, None, 0)
        self.root.states = [source.start(request_id) for source in sources]
        self._made = {(-1, root): self.root}  # by the parent's serial number and the token
        self.restart()

    def restart(self) -> None:
        """Begin again with the root alone. What the sources named is kept."""
        self.nodes = [self.root]
        # A heap of nodes to come: the most likely first, of equals the first one named.
        self._waiting: list[tuple[float, int, Node, int]] = []
        self._count = 0
        self._is_open = True  # the next tokens of the last node are not waiting yet

    def next_p(self) -> float:
        """The probability of the most likely node that is not in the tree; 0 if there is none."""
        if self._is_open:
            self._is_open = False
            node = self.nodes[-1]
            if self.is_chain:
                self._waiting = []
            if node.depth < self.deepest and node.token not in self.stop_ids:
                self._wait_for(self._ask(node))
        return -self._waiting[0][0] if self._waiting else 0.0

    def take(self) -> None:
        """Add the most likely node to the tree, if there is one."""
        if not self.next_p():
            return
        p, _, parent, token = heappop(self._waiting)
        node = self._make(parent, token)
        node.p, node.best, node.number = -p, parent.likely[token][1], len(self.nodes)
        self.nodes.append(node)
        self._is_open = True

    def add_path(self, tokens: Iterable[int], most: int) -> None:
        """Add a path of tokens after the root, until the tree has `most` nodes.

        Call it when the tree has grown. Nodes that are in the tree already are shared.
        """
        node = self.root
        for token in tokens:
            node = self._make(node, token)
            if node not in self.nodes:
                if len(self.nodes) >= most or node.depth > self.deepest:
                    return
                node.number = len(self.nodes)
                self.nodes.append(node)

    def add(self, node: Node, source: int, continuations: Iterable[Named]) -> None:
        """Add the continuations of a node that a source names. They count after `restart`."""
        self._ask(node)
        self._add(node, source, continuations)

    def learn(self, tokens: Sequence[int]) -> list[tuple[Node, int]]:
        """Count which continuations were right. tokens: those accepted after the root, then the bonus token.

        Returns the accepted nodes, root first, each with the source that was most confident of the next token, or -1.
        """
        node: Node | None = self.root
        accepted = []
        for token in tokens:
            if node is None:
                break
            self._ask(node)
            for source, continuations in node.named or ():
                for named, _, kind in continuations:
                    counts = self.counts[source].setdefault(kind, [0, 0])
                    counts[0] += named == token
                    counts[1] += 1
            accepted.append((node, node.likely.get(token, (0.0, -1))[1]))
            node = self._made.get((node.serial, token))
        return accepted

    def _make(self, parent: Node, token: int) -> Node:
        """The node of a token after another node, always the same one."""
        key = parent.serial, token
        node = self._made.get(key)
        if node is None:
            node = self._made[key] = Node(token, parent, len(self._made))
        return node

    def _ask(self, node: Node) -> Node:
        """The node, after all sources have been asked for its continuations."""
        if node.named is None:
            node.named = []
            if node.parent is not None:
                pairs = zip(self.sources, node.parent.states, strict=True)
                node.states = [source.follow(state, node.token) for source, state in pairs]
            for number, (source, state) in enumerate(zip(self.sources, node.states, strict=True)):
                self._add(node, number, source.continuations(state))
        return node

    def _add(self, node: Node, source: int, continuations: Iterable[Named]) -> None:
        assert node.named is not None
        found = list(continuations)
        node.named.append((source, found))
        kinds, likely, least = self.counts[source], node.likely, self.least / node.p
        for token, p, kind in found:
            counts = kinds.get(kind)
            if counts is not None:
                p = correct(p, counts)
            if p >= least and 0 <= token < self.vocabulary and (token not in likely or p > likely[token][0]):
                likely[token] = p, source

    def _wait_for(self, node: Node) -> None:
        """Let the next tokens of a node wait."""
        for token, (p, _) in node.likely.items():
            self._count += 1
            heappush(self._waiting, (-node.p * p, self._count, node, token))
