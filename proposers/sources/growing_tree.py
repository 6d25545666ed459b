"""One request's draft tree, grown best-first from the continuations that several sources name."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any, TypeAlias

from decode import Request, Target
from proposers.sources.source import Named, Source

LEARNED_WEIGHT = 30.0  # continuations of a kind that a source's own estimate counts for
Kinds: TypeAlias = dict[Hashable, list[int]]  # by kind: how many of a source's continuations were right, and all
TRUST_MEMORY, TRUST_WEIGHT = 0.98, 8.0  # weight of what was learned before, per step; expected tokens of `usual`


class Trust:
    """The share of a source's drafted tokens that are right, of those that should be by its own estimates.

    Those that are drafted are the ones that it is most confident of, often by mistake. usual: before any is seen, and
    again when none was drafted for long.
    """

    def __init__(self, usual: float) -> None:
        self.share, self._usual = usual, usual
        self._right = self._expected = 0.0

    def fade(self) -> None:
        """Let what was learned count less. Call it once a step."""
        self._right, self._expected = TRUST_MEMORY * self._right, TRUST_MEMORY * self._expected
        share = (TRUST_WEIGHT * self._usual + self._right) / (TRUST_WEIGHT + self._expected)
        self.share = min(1.0, share)

    def learn(self, p: float, is_right: bool) -> None:
        """Take in what became of a drafted token after a right path. p: the source's own probability."""
        self._right, self._expected = self._right + is_right, self._expected + p


class GrowingNode:
    """A node of a growing tree."""

    __slots__ = (
        *("allowed", "best", "depth", "draft", "likely", "named", "number", "p", "parent", "path", "serial"),
        *("states", "token"),
    )

    def __init__(self, token: int, parent: GrowingNode | None, serial: int) -> None:
        self.token, self.parent, self.serial = token, parent, serial
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.best = -1  # the source that is most confident of it
        self.p = 1.0  # the probability that the whole path to it is right
        self.number = 0  # its place in the tree
        self.states: list[Any] = []
        self.named: list[tuple[int, Iterable[Named]]] | None = None  # by source; None: none was asked yet
        self.likely: dict[int, tuple[float, int]] = {}  # by next token: its probability after this node, and `best`
        self.draft: tuple[int, ...] = ()  # with a grammar: the draft tokens up to it
        self.allowed: Any = None  # by next token, if a grammar forbids some
        self.path = -1  # of a source that drafts level by level: the place in its last level

    @property
    def unknown(self) -> float:
        """The probability that no source has named the next token."""
        return max(0.0, 1.0 - sum(p for p, _ in self.likely.values()))


class GrowingTree:
    """A tree of the most likely nodes, which grows by a node at a time.

    Of several sources that name a token the most confident one is believed: they often have the same reason, so that
    adding up would be too confident. Nodes do not refer to their children, so that no garbage collection is needed.

    request: its text ends with the root. There are no nodes deeper than it has room for, nor after a token that ends
    it, nor such that its grammar forbids.
    counts, trusts: of each source, what was learned of it. least: the smallest probability of a node. target: tokens
    outside of its vocabulary, as of a damaged store, are ignored; if it keeps a recurrent state, the tree is a chain.
    """

    def __init__(
        self,
        request: Request,
        sources: Sequence[Source],
        counts: Sequence[Kinds],
        trusts: Sequence[Trust],
        least: float,
        target: Target | None = None,
    ) -> None:
        self.sources, self.counts, self.trusts = sources, counts, trusts
        self._shares = [trust.share for trust in trusts]
        self.least, self.deepest = least, request.room - 1
        self.stop_ids, self.constraint = request.limits.stop_ids, request.constraint
        self.vocabulary = inf if target is None else target.vocabulary
        self.is_chain = target is not None and target.is_recurrent
        self.root = GrowingNode(request.sequence[-1], None, 0)
        self.root.states = [source.start(request.request_id) for source in sources]
        self.nodes = [self.root]
        self._made = {(-1, self.root.token): self.root}  # by the parent's serial number and the token

    def grow(self, most: int) -> Iterator[float]:
        """Let the tree grow from its root again, to at most `most` nodes: by the most likely node with each `next`.

        Gives that node's probability before it is added. What the sources named is kept.
        """
        node, self.nodes = self.root, [self.root]
        # A heap of nodes to come: the most likely first, of equals the first one named.
        waiting: list[tuple[float, int, int, GrowingNode, int]] = []
        while len(self.nodes) < most:
            if self.is_chain:
                waiting = []
            if node.depth < self.deepest and node.token not in self.stop_ids:
                self._ask(node)
                for place, (token, (p, _)) in enumerate(node.likely.items()):
                    heappush(waiting, (-node.p * p, node.number, place, node, token))
            if not waiting or not waiting[0][0]:
                return
            yield -waiting[0][0]
            p, _, _, parent, token = heappop(waiting)
            node = self._make(parent, token)
            node.p, node.best, node.number = -p, parent.likely[token][1], len(self.nodes)
            self.nodes.append(node)

    def add(self, node: GrowingNode, source: int, continuations: Iterable[Named]) -> None:
        """Add the continuations of a node that a source names. They count when it grows again."""
        self._ask(node)
        assert node.named is not None
        found = list(continuations)
        node.named.append((source, found))
        kinds, likely, least, share = self.counts[source], node.likely, self.least / node.p, self._shares[source]
        for token, p, kind in found:
            counts = kinds.get(kind)
            if counts is not None:  # what became of such continuations
                p = (counts[0] + LEARNED_WEIGHT * p) / (counts[1] + LEARNED_WEIGHT)
            p = min(1.0, p * share)
            if p < least or not 0 <= token < self.vocabulary or (token in likely and p <= likely[token][0]):
                continue
            if node.allowed is None or (len(node.allowed) and node.allowed[token]):
                likely[token] = p, source

    def follow(self, tokens: Iterable[int]) -> list[GrowingNode]:
        """The nodes of accepted tokens after the root."""
        nodes = [self.root]
        for token in tokens:
            nodes.append(self._made[nodes[-1].serial, token])
        return nodes[1:]

    def learn(self, tokens: Sequence[int]) -> list[tuple[GrowingNode, int]]:
        """Count which continuations were right. tokens: those accepted after the root, then the bonus token.

        Returns the accepted nodes, root first, each with the source that was most confident of the next token, or -1.
        """
        node: GrowingNode | None = self.root
        self.constraint, accepted = None, []  # it has gone on
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
        right = {each.serial: token for (each, _), token in zip(accepted, tokens, strict=False)}
        for each in self.nodes[1:]:
            parent = each.parent
            if parent is not None and parent.serial in right and each.best >= 0:
                p = each.p / parent.p / self._shares[each.best]
                self.trusts[each.best].learn(p, each.token == right[parent.serial])
        return accepted

    def _make(self, parent: GrowingNode, token: int) -> GrowingNode:
        """The node of a token after another node, always the same one."""
        key = parent.serial, token
        node = self._made.get(key)
        if node is None:
            node = self._made[key] = GrowingNode(token, parent, len(self._made))
        return node

    def _ask(self, node: GrowingNode) -> None:
        """Ask all sources for a node's continuations, once."""
        if node.named is not None:
            return
        node.named = []
        if node.parent is not None:
            pairs = zip(self.sources, node.parent.states, strict=True)
            node.states = [None if state is None else source.follow(state, node.token) for source, state in pairs]
        if self.constraint is not None:
            node.draft = () if node.parent is None else (*node.parent.draft, node.token)
            allowed = self.constraint.find_allowed(node.draft)
            node.allowed = () if allowed is None else allowed.numpy()
        for number, (source, state) in enumerate(zip(self.sources, node.states, strict=True)):
            if state is not None:
                self.add(node, number, source.continuations(state))
