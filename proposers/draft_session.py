"""A draft model's cache of a batch's texts, and its forward passes over a tree that grows level by level.

Shapes: B rows, W paths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decode import Session, Step, Target, Tree


class DraftSession:
    """Reads the texts of one stream with a draft model. Tokens wait until a draft needs them.

    Logits have the target's vocabulary. The draft model's own output may be padded to another size.
    """

    def __init__(self, draft: Target) -> None:
        self.draft = draft
        self._session: Session
        self._levels: list[tuple[Tensor, Tensor]] = []  # tokens and parents [B, W] of the paths read since `start`

    def observe(self, step: Step) -> None:
        """Follow the batch, and keep what was read of the accepted tokens."""
        if step.is_prefill:
            self._session, self._vocabulary = self.draft.open(len(step.request_ids)), step.target.vocabulary
        else:
            accepted, rows = self._find_accepted(step), range(len(self._session.lengths))
            self._session.keep([accepted.get(row, []) for row in rows])  # before rows move
            if len(step.kept) < len(rows):
                self._session.select(step.kept)
        self._levels = []

    def start(self, step: Step) -> Tensor:
        """Read the texts to their ends, the roots. Returns the logits [B, V] after them."""
        unread = zip(step.sequences, self._session.lengths, strict=True)
        return self._fit(self._session.extend([self._read(sequence[length:]) for sequence, length in unread])[0])

    def extend(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Read one more token of W paths. Returns the logits [B, W, V] after them.

        Each path is the path `parents` [B, W] of the last call, or the root in the first call, and a token [B, W].
        """
        begin = sum(level.shape[1] for level, _ in self._levels)
        first = begin - self._levels[-1][0].shape[1] if self._levels else 0
        self._levels.append((tokens, first + parents if self._levels else torch.full_like(parents, -1)))
        tree = self._make_tree()
        known = tree.tokens.clamp(max=self.draft.vocabulary - 1)
        return self._fit(self._session.verify(replace(tree, tokens=known), start=begin).logits)

    def _read(self, tokens: Sequence[int]) -> list[int]:
        """The tokens, with another one in place of those that the draft model does not have."""
        return [min(token, self.draft.vocabulary - 1) for token in tokens]

    def _fit(self, logits: Tensor) -> Tensor:
        """The logits [..., V] of the target's vocabulary; tokens that the draft model does not have are impossible."""
        missing = self._vocabulary - logits.shape[-1]
        return logits if missing == 0 else torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)

    def _find_accepted(self, step: Step) -> dict[int, list[int]]:
        """The accepted nodes of the trees of the rows that go on."""
        if not self._levels:
            return {}
        tree = self._make_tree()
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        rows = zip(step.kept, step.committed, strict=True)
        return {row: _find_path(tokens[row], parents[row], text[1:]) for row, text in rows}

    def _make_tree(self) -> Tree:
        """The paths as a tree without its root."""
        tokens, parents = (torch.cat(parts, dim=1) for parts in zip(*self._levels, strict=True))
        sizes = torch.full_like(tokens[:, 0], tokens.shape[1])
        if tokens.shape[1] == len(self._levels):
            return Tree.chain_of(tokens, sizes)
        return Tree(tokens, parents, sizes, height=len(self._levels) - 1)


def _find_path(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> list[int]:
    """The nodes that are the beginning of a text, as far as there are any."""
    children: dict[tuple[int, int], int] = {}
    for node, place in enumerate(zip(parents, tokens, strict=True)):
        children.setdefault(place, node)  # padding may repeat a path
    path, node = [], -1
    for token in text:
        if (node, token) not in children:
            break
        node = children[node, token]
        path.append(node)
    return path
