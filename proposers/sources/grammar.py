"""The tokens that a request's grammar leaves no choice about, such as the names of a JSON schema's fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from decode import Step
from decode.grammars.matcher import Constraint
from proposers.sources.source import Named, Source

FEW = 8  # tokens that are named where there is a choice


class Position(NamedTuple):
    """A node of a request whose answer must fit a grammar: the answer's length, and the draft tokens after it."""

    constraint: Constraint
    taken: int
    draft: tuple[int, ...] = ()


class GrammarSource(Source):
    """Names the tokens that must follow, cut as the tokenizer cuts them, and few tokens that may, equally likely.

    The model may cut a text in another way. How often it does is learned.
    """

    usual_trust = 1.0

    def observe(self, step: Step) -> None:
        self._constraints = {request.request_id: request.constraint for request in step.requests}

    def start(self, request_id: int) -> Position | None:
        constraint = self._constraints[request_id]
        return None if constraint is None else Position(constraint, constraint.taken)

    def follow(self, state: Position, token: int) -> Position:
        return state._replace(draft=(*state.draft, token))

    def continuations(self, state: Position) -> Iterable[Named]:
        if state.taken != state.constraint.taken:  # asked after the step, when the answer has grown
            return ()
        if forced := state.constraint.find_forced(state.draft):
            return ((forced[0], 1.0, 1),)
        allowed = state.constraint.find_allowed(state.draft)
        if allowed is None or not 0 < (count := int(allowed.count_nonzero())) <= FEW:
            return ()
        return [(token, 1 / count, count) for token in allowed.nonzero()[:, 0].tolist()]
