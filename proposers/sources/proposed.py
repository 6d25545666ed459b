"""The drafts of any other proposer as a source."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import NamedTuple

from decode import Proposer, Step
from proposers.sources.source import Named, Source

NODES = 16  # of the other proposer's trees, root included
DEEPEST = 8  # deeper continuations are counted as if they were as deep as this
LIKELY = 0.5, 0.2, 0.1  # probabilities of a node's first, second and further continuations, before any is learned


class Drafted(NamedTuple):
    """A node of the other proposer's tree, or -1 for any other node."""

    children: list[dict[int, tuple[int, float | None]]]  # of each of its nodes, by token: the node and its probability
    node: int
    depth: int


class ProposerSource(Source):
    """Continues the nodes that another proposer drafts as that proposer does.

    make: makes the proposer, which drafts in every step, whether it is worth its time or not. Its trees are merged with
    others, so it should size them without learning from how many tokens were accepted.

    Raises ValueError for a proposer that reads the target's features; `HeadSource` is for these.
    """

    def __init__(self, make: Callable[[], Proposer]) -> None:
        self.make, self.proposer = make, make()
        if self.proposer.layers:
            raise ValueError(f"{type(self.proposer).__name__} reads features; use HeadSource")

    @property
    def name(self) -> str:
        return type(self.proposer).__name__.removesuffix("Proposer").lower()

    def renew(self) -> ProposerSource:
        return ProposerSource(self.make)

    def observe(self, step: Step) -> None:
        tree = self.proposer.propose(step, NODES if max(step.room) > 1 else 1)
        scores = None if tree.scores is None else tree.scores.exp().tolist()
        self._roots: dict[int, Drafted] = {}
        rows = zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
        for row, (request_id, (tokens, parents)) in enumerate(zip(step.request_ids, rows, strict=True)):
            children: list[dict[int, tuple[int, float | None]]] = [{} for _ in tokens]
            for node in range(1, len(tokens)):
                if (parent := parents[node]) >= 0:
                    p = None if scores is None else scores[row][node] / max(scores[row][parent], exp(-99))
                    children[parent].setdefault(tokens[node], (node, p))
            self._roots[request_id] = Drafted(children, 0, 0)

    def start(self, request_id: int) -> Drafted:
        return self._roots[request_id]

    def follow(self, state: Drafted, token: int) -> Drafted:
        node = state.children[state.node].get(token, (-1, None))[0] if state.node >= 0 else -1
        return Drafted(state.children, node, state.depth + 1)

    def continuations(self, state: Drafted) -> list[Named]:
        children = state.children[state.node] if state.node >= 0 else {}
        depth, last = min(state.depth, DEEPEST), len(LIKELY) - 1
        return [
            (token, LIKELY[min(rank, last)] if p is None else p, (depth, min(rank, last)))
            for rank, (token, (_, p)) in enumerate(children.items())
        ]
