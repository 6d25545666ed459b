"""Sources of a draft tree: each names likely next tokens for any node of the tree.

`MergedProposer` asks all of its sources about the same nodes, so a node's children may come from several of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from copy import copy
from math import exp
from typing import Any, NamedTuple, Self, TypeAlias

from decode import Step


class Continuation(NamedTuple):
    """A token that may follow a node.

    token: its id. p: the source's own estimate that the token is right if the path before it is.
    kind: whatever distinguishes good continuations from bad ones; the merged tree counts how many of each kind are
    right and corrects `p` by that.
    """

    token: int
    p: float
    kind: Hashable = None


Named: TypeAlias = tuple[int, float, Hashable]  # a continuation; plain tuples are made in a quarter of the time


def sigmoid(log_odds: float) -> float:
    """The probability with such odds."""
    return 1 / (1 + exp(-log_odds))


class Place(NamedTuple):
    """A node of a draft tree.

    text: the token ids of its request, the last of them being the root. draft: the draft tokens from there to the node.
    """

    text: Sequence[int]
    draft: tuple[int, ...] = ()


class Source(ABC):
    """Names likely next tokens. The smallest source has `continuations` only and reads the text of a `Place`.

    A source that keeps something for each node, such as a state of an automaton, overrides `start` and `follow` as well
    and gets what they return instead of a `Place`.
    """

    usual_trust: float = 0.9  # of its drafted tokens, those that are right, relative to its own estimates (`Trust`)

    @property
    def name(self) -> str:
        """What accepted tokens are counted under: "suffix" for `SuffixSource`."""
        return type(self).__name__.removesuffix("Source").lower()

    def observe(self, step: Step) -> None:
        """Take in a finished step. Called once before each draft."""
        self._texts = dict(zip(step.request_ids, step.sequences, strict=True))

    def start(self, request_id: int) -> Any:
        """The state of the root, the last token of the text. None: it is asked about no node after that."""
        return Place(self._texts[request_id])

    def follow(self, state: Any, token: int) -> Any:
        """The state of a node's child, whichever source named it."""
        return Place(state.text, (*state.draft, token))

    def renew(self) -> Self:
        """The same source with nothing learned."""
        return copy(self)

    @abstractmethod
    def continuations(self, state: Any) -> Iterable[Named]:
        """The tokens that may follow a node, at most about ten: each a `Continuation`, or a tuple of the same."""
