"""Lookahead decoding: the target predicts several later tokens at once, and n-grams of its predictions are drafted.

After Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (2024). The window holds
assumed tokens for the next positions, in columns. Level 0 is the chain of the columns' first tokens, right after the
root; the rest of a column is a branch below its first token. Each forward pass predicts one more token at the end of
every column, a step of a parallel Jacobi iteration. A full column and its prediction are an n-gram. The pool keeps it
until the text comes to its first token. Here the window and the pool's n-grams are one ordinary draft tree: the one
verifier checks it, and tokens of the window may be accepted too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from random import Random

from decode import Step, Tree

POOLED = 1 << 13  # first tokens in a request's pool, which takes 6 MB at most with the default sizes


class LookaheadProposer:
    """Drafts continuations from a pool of n-grams, and a window of assumed tokens that produces these n-grams.

    window: columns of the window, W.
    size: tokens of an n-gram, N. The window has N - 1 levels, and a continuation N - 1 tokens.
    continuations: drafted after the root, and kept for each first token, at most; G.

    A tree has up to 1 + (W + G)(N - 1) nodes: 19 by default, which suits a CPU. The authors take (W, N, G) = (7, 5, 7)
    for models of 7B parameters on a GPU: 57 nodes. A smaller budget gets fewer columns and continuations. The sizes are
    fixed: they do not adapt to the acceptance or the device.

    Raises ValueError for fewer than one column or continuation, and n-grams of fewer than two tokens.
    """

    layers: Sequence[int] = ()

    def __init__(self, window: int = 3, size: int = 4, continuations: int = 3) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; it has at least one column")
        if size < 2:
            raise ValueError(f"size is {size}; an n-gram to draft from has at least two tokens")
        if continuations < 1:
            raise ValueError(f"continuations is {continuations}; at least one is kept for each first token")
        self.window, self.size, self.continuations = window, size, continuations
        self._requests: dict[int, RequestState] = {}

    def propose(self, step: Step, budget: int) -> Tree:
        self._observe(step)
        columns, pooled = self._split(budget)
        rows = []
        for request_id, text in zip(step.request_ids, step.sequences, strict=True):
            request = self._requests[request_id]
            request.window.resize(columns, text)
            rows.append(request.draft(text[-1], pooled))
        return Tree.of_rows([(row.tokens, row.parents) for row in rows])

    def _split(self, budget: int) -> tuple[int, int]:
        """The columns of the window, and the most nodes for continuations from the pool."""
        branches = (budget - 1) // (self.size - 1)  # columns and continuations are equally expensive
        columns = min(self.window, max(branches - self.continuations, (branches + 1) // 2))
        return columns, min(self.continuations * (self.size - 1), budget - 1 - columns * (self.size - 1))

    def _observe(self, step: Step) -> None:
        if step.is_prefill:
            self._requests = {
                request_id: RequestState(request_id, self.size, self.continuations) for request_id in step.request_ids
            }
        else:
            self._requests = {request_id: self._requests[request_id] for request_id in step.request_ids}
            self._advance(step)
        for request_id, text in zip(step.request_ids, step.sequences, strict=True):
            self._requests[request_id].read(text)

    def _advance(self, step: Step) -> None:
        """Extend each row's window by the predictions after its columns."""
        requests = [self._requests[request_id] for request_id in step.request_ids]
        trees = zip(requests, step.tree.tokens.tolist(), step.tree.parents.tolist(), strict=True)
        ends = [request.window.find_ends(tokens, parents) for request, tokens, parents in trees]
        rows = [row for row, nodes in enumerate(ends) for _ in nodes]
        # Only the logits of these nodes are read.
        predicted = iter(step.logits[rows, [node for nodes in ends for node in nodes]].argmax(dim=-1).tolist())
        for request, nodes, path in zip(requests, ends, step.path, strict=True):
            request.advance(list(islice(predicted, len(nodes))), len(path))


class RequestState:
    """What is kept for one request: its pool, its window, and how much of its text the pool has read."""

    def __init__(self, request_id: int, size: int, continuations: int) -> None:
        self.pool = Pool(continuations)
        self.window = Window(size - 1, request_id)
        self.size = size
        self.indexed = 0  # n-grams that end before this token are in the pool

    def read(self, text: Sequence[int]) -> None:
        """Put the new n-grams of the text into the pool."""
        for end in range(max(self.indexed, self.size - 1), len(text)):
            self.pool.add(text[end - self.size + 1 : end + 1])
        self.indexed = len(text)

    def advance(self, predicted: Sequence[int], passed: int) -> None:
        for gram in self.window.advance(predicted, passed):
            self.pool.add(gram)

    def draft(self, root: int, pooled: int) -> DraftNodes:
        """The tree: continuations from the pool with at most `pooled` nodes, then the window."""
        nodes = DraftNodes(root)
        for continuation in self.pool.find(root):
            nodes.add_path(0, continuation[: 1 + pooled - len(nodes.tokens)])
        first = 0
        for column in self.window.columns:
            first = nodes.add(first, column[0])
            nodes.add_path(first, column[1:])
        return nodes


class Pool:
    """N-grams by their first token. The oldest go first, so that its size is bounded."""

    def __init__(self, continuations: int) -> None:
        self.continuations = continuations
        self._grams: dict[int, list[tuple[int, ...]]] = {}  # the newest first token last, the newest continuation first

    def add(self, gram: Sequence[int]) -> None:
        first, continuation = gram[0], tuple(gram[1:])
        kept = [other for other in self._grams.pop(first, ()) if other != continuation]
        self._grams[first] = [continuation, *kept[: self.continuations - 1]]
        if len(self._grams) > POOLED:
            del self._grams[next(iter(self._grams))]

    def find(self, first: int) -> Sequence[tuple[int, ...]]:
        """The continuations of a token, newest first."""
        return self._grams.get(first, ())


class Window:
    """Columns of assumed tokens: column i begins i + 1 tokens after the root. All have the same number of levels.

    It begins with one level and gains one a step. When full, each step moves all levels up by one.
    """

    def __init__(self, levels: int, request_id: int) -> None:
        self.full = levels
        self.levels = 1
        self.columns: list[list[int]] = []
        self._random = Random(request_id)  # the same request gets the same drafts in any batch

    def resize(self, columns: int, text: Sequence[int]) -> None:
        """Drop the last columns, or fill new ones with tokens from random places in the text."""
        del self.columns[columns:]
        while len(self.columns) < columns:
            begin = self._random.randrange(len(text))
            self.columns.append([text[(begin + level) % len(text)] for level in range(self.levels)])

    def find_ends(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The last node of each column in a verified tree, up to the first column that was cut off."""
        nodes: dict[tuple[int | None, int], int] = {
            place: node for node, place in enumerate(zip(parents, tokens, strict=True)) if place[0] >= 0
        }
        first: int | None = 0
        ends = []
        for column in self.columns:
            first = end = nodes.get((first, column[0]))
            for token in column[1:]:
                end = nodes.get((end, token))
            if end is None:
                break
            ends.append(end)
        return ends

    def advance(self, predicted: Sequence[int], passed: int) -> list[list[int]]:
        """Extend the first columns by a predicted token each; columns without one are lost.

        passed: tokens that the root has moved on. Returns the n-grams that were completed.
        """
        columns = [[*column, token] for column, token in zip(self.columns, predicted, strict=False)]
        if self.levels < self.full:
            self.levels += 1
            self.columns = columns[passed:]
            return []
        self.columns = [column[1:] for column in columns[passed - 1 :]]  # without level 0 they begin one token later
        return columns


class DraftNodes:
    """A row's tree. Nodes with the same parent and token are one node."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents = [root], [-1]
        self._places: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        """The node that drafts `token` after `parent`."""
        node = self._places.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def add_path(self, node: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            node = self.add(node, token)
