"""What a grammar allows after an answer's tokens so far, and after each path of draft tokens.

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from decode.trees.tree import Tree

Path = tuple[int, ...]  # draft tokens after the answer so far
NO_TOKEN_LEFT = "the grammar allows no token here, and the answer is not complete"


class Matcher(Protocol):
    """A grammar's state after some tokens."""

    def accept(self, token: int) -> bool:
        """Go on by a token. Returns False, and stays as it is, if the grammar forbids the token."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
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
    """One request's grammar: its matcher, which goes to and fro between the paths of a draft tree.

    make: makes the matcher at the answer's beginning. vocabulary: V.
    An error of a matcher counts as "no token is allowed", so that it ends the answer only if the text gets there.
    """

    def __init__(self, make: Callable[[], Matcher], vocabulary: int) -> None:
        self._make, self.vocabulary = make, vocabulary
        self._matcher: Matcher | None = None
        self._answer: list[int] = []
        self._path: Path = ()  # what the matcher has read after the answer
        self._allowed: dict[Path, Tensor | None] = {}
        self._error: Exception | None = None  # the matcher's last one since the answer has grown

    def find_allowed(self, path: Path = ()) -> Tensor | None:
        """The tokens [V] bool that may follow draft tokens, which must be allowed; None: the answer ends with them."""
        if path not in self._allowed:
            try:
                matcher = self._move(path)
                self._allowed[path] = None if matcher.is_complete else self._check(matcher.find_allowed())
            except Exception as error:
                self._error, self._matcher = error, None  # its state is not known any more
                self._allowed[path] = torch.zeros(self.vocabulary, dtype=torch.bool)
        return self._allowed[path]

    def find_forced(self, path: Path) -> Sequence[int]:
        """The tokens that must follow draft tokens, if there is no choice."""
        allowed = self.find_allowed(path)
        return () if allowed is None or not bool(allowed.any()) else self._move(path).find_forced()

    def take(self, token: int) -> None:
        """Add a token to the answer. Raises ValueError if the grammar forbids it."""
        if self._path[:1] == (token,):
            self._path = self._path[1:]
        else:
            self._move((token,))
            self._path = ()
        self._answer.append(token)
        self._allowed.clear()
        self._error = None

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
        return self._error or ValueError(NO_TOKEN_LEFT)

    def _move(self, path: Path) -> Matcher:
        """The matcher after the answer and a path."""
        if self._matcher is None:
            self._matcher, self._path = self._make(), ()
            self._read(self._matcher, self._answer)
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if len(self._path) > shared:
            self._matcher.rollback(len(self._path) - shared)
        self._path = path[:shared]
        self._read(self._matcher, path[shared:])
        self._path = path
        return self._matcher

    def _read(self, matcher: Matcher, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not matcher.accept(token):
                self._matcher = None
                raise ValueError(f"the grammar forbids token {token}, which follows in the answer")

    def _check(self, allowed: Tensor) -> Tensor:
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool or allowed.shape != (self.vocabulary,):
            kind = f"{[*allowed.shape]} of {allowed.dtype}" if isinstance(allowed, Tensor) else type(allowed).__name__
            raise ValueError(f"find_allowed returned {kind}; it must return a tensor [{self.vocabulary}] of torch.bool")
        return allowed


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
        paths, masks = {0: Path()}, [constraint.find_allowed()]
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
    for row, mask in allowed.items():
        logits[row, : len(mask)].masked_fill_(~mask.to(logits.device), -torch.inf)
    return logits
