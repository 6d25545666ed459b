"""What a grammar allows after an answer's tokens so far, and after each path of draft tokens.

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from decode.devices.transfer import copy_packed
from decode.trees.tree import Tree

T = TypeVar("T")
DraftPath = tuple[int, ...]  # draft tokens after the answer so far
NO_TOKEN_LEFT = "the grammar allows no token here, and the answer is not complete"


class Matcher(Protocol):
    """A grammar's state after some tokens."""

    def accept(self, token: int) -> bool:
        """Go on by a token. Returns False, and stays as it is, if the grammar forbids the token."""
        ...

    def fork(self) -> Matcher:
        """A matcher of its own in the same state."""
        ...

    def find_allowed(self) -> Tensor:
        """The tokens [V] bool that may come next, on the CPU."""
        ...

    def find_forced(self) -> Sequence[int]:
        """The next tokens if the grammar leaves no choice, as the tokenizer cuts their text; else none."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        ...


class Constraint:
    """One request's grammar: a matcher after its answer, and one after each path of a draft tree that is asked about.

    make: makes the matcher at the answer's beginning. vocabulary: V.
    An error of a matcher counts as "no token is allowed", so that it ends the answer only if the text gets there.
    """

    def __init__(self, make: Callable[[], Matcher], vocabulary: int) -> None:
        self._make, self.vocabulary = make, vocabulary
        self._answer: list[int] = []
        self._matchers: dict[DraftPath, Matcher] = {}
        self._allowed: dict[DraftPath, Tensor | None] = {}
        self._errors: dict[DraftPath, Exception] = {}

    def find_allowed(self, path: DraftPath = ()) -> Tensor | None:
        """The tokens [V] bool that may follow a path of allowed draft tokens; None: the answer is complete there."""
        if path not in self._allowed:
            try:
                matcher = self._find(path)
                self._allowed[path] = None if matcher.is_complete else self._check(matcher.find_allowed())
            except Exception as error:
                self._errors[path] = error
                self._allowed[path] = torch.zeros(self.vocabulary, dtype=torch.bool)
        return self._allowed[path]

    def find_forced(self, path: DraftPath) -> Sequence[int]:
        """The tokens that must follow a path of allowed draft tokens, if there is no choice."""
        allowed = self.find_allowed(path)
        if allowed is None or path in self._errors:
            return ()
        try:
            return [int(token) for token in self._find(path).find_forced()]
        except Exception:  # it is only a hint
            return ()

    def take(self, token: int) -> None:
        """Add a token to the answer. Raises ValueError if the grammar forbids it, and what the matcher raises."""
        self._find((token,))
        self._answer.append(token)
        self._matchers, self._allowed = shift(self._matchers, token), shift(self._allowed, token)
        self._errors = shift(self._errors, token)

    @property
    def taken(self) -> int:
        """The answer's tokens so far."""
        return len(self._answer)

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return self.find_allowed() is None

    def find_error(self) -> Exception | None:
        """Why no token can follow the answer; None if one can."""
        allowed = self.find_allowed()
        if allowed is None or bool(allowed.any()):
            return None
        return self._errors.get(()) or ValueError(NO_TOKEN_LEFT)

    def _find(self, path: DraftPath) -> Matcher:
        """The matcher after the answer and a path."""
        if path not in self._matchers:
            matcher, tokens = (self._find(path[:-1]).fork(), path[-1:]) if path else (self._make(), self._answer)
            for token in tokens:
                if not matcher.accept(token):
                    raise ValueError(f"the grammar forbids token {token}, which follows in the answer")
            self._matchers[path] = matcher
        return self._matchers[path]

    def _check(self, allowed: Tensor) -> Tensor:
        kind, right = type(allowed).__name__, f"[{self.vocabulary}] of torch.bool on cpu"
        if isinstance(allowed, Tensor):
            kind = f"{[*allowed.shape]} of {allowed.dtype} on {allowed.device}"
        if kind != right:
            raise ValueError(f"find_allowed returned {kind}; it must return a tensor {right}")
        return allowed.clone()  # the matcher may write into it


def shift(known: Mapping[DraftPath, T], token: int) -> dict[DraftPath, T]:
    """What is known of paths that begin with a token, by the paths after it."""
    return {path[1:]: each for path, each in known.items() if path[:1] == (token,)}


def constrain(tree: Tree, constraints: Sequence[Constraint | None]) -> tuple[Tree, dict[int, Tensor]]:
    """The trees without draft tokens that grammars forbid, and what may follow each node [n, V] bool, by row.

    A sampled draft keeps its first forbidden token: the rule that accepts it must see that it was drawn. tree: on the
    CPU.
    """
    if not any(constraints):
        return tree, {}
    kept, allowed = tree.real.clone(), dict[int, Tensor]()
    rows = zip(constraints, tree.tokens.tolist(), tree.parents.tolist(), tree.sizes.tolist(), strict=True)
    for row, (constraint, tokens, parents, size) in enumerate(rows):
        if constraint is None:
            continue
        paths, masks = {0: DraftPath()}, [constraint.find_allowed()]
        found = {0: masks[0]}  # by node
        for node in range(1, size):
            before = found.get(parents[node])
            if before is not None and bool(before[tokens[node]]):
                paths[node] = (*paths[parents[node]], tokens[node])
                found[node] = constraint.find_allowed(paths[node])
                masks.append(found[node])
            elif before is not None and tree.q is not None:
                masks.append(None)
            else:
                kept[row, node] = False
        allowed[row] = torch.ones(len(masks), constraint.vocabulary, dtype=torch.bool)
        for place, mask in enumerate(masks):
            if mask is not None:  # else nothing that follows is used
                allowed[row][place] = mask
    return tree.keep(kept), allowed


def forbid(logits: Tensor, allowed: Mapping[int, Tensor]) -> Tensor:
    """The logits [B, N, V], with minus infinity for tokens that are not allowed. allowed: by row, as in `constrain`."""
    if not allowed:
        return logits
    logits = logits.clone()
    masks = copy_packed({str(row): ~mask for row, mask in allowed.items()}, logits.device)
    for row, mask in allowed.items():
        logits[row, : len(mask)].masked_fill_(masks[str(row)], -torch.inf)
    return logits
