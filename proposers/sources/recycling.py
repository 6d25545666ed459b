"""The target's own predictions after the same last tokens, earlier in the text: recycled logits.

After Luo et al., "Token Recycling" (2024), with longer keys and probabilities; and Liu et al., "LogitSpec" (2025): what
was nearly chosen instead of the last token often comes next. Shapes: B rows, N nodes, R ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, inf
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from decode import Step, Tree
from decode.devices.backend import top_tokens
from decode.devices.transfer import read, waits
from proposers.sources.source import Named, Source, sigmoid

KEPT_RANKS = 8  # most likely next tokens that are kept
ORDERS = 3  # of the keys: the last 1, 2 and 3 tokens
SHARES = 8  # probabilities are kept in so many steps
KEYS = 1 << 16  # kept for each request, some 50 MB; the oldest go first
# A continuation's log-odds of being right, fitted on 88 answers of the default model to real users' prompts and to
# exercises: by the key's length and the share of the prediction, plus by its rank; and the same of rivals.
SHARE_WEIGHT = (
    (),
    (-2.30, -1.62, -1.18, -0.74, -0.77, -0.38, -0.25, 0.12),
    (-2.41, -1.30, -0.66, -0.40, -0.18, 0.46, 0.61, 1.71),
    (-3.08, -1.39, -0.61, -0.06, 0.61, 0.73, 1.56, 2.51),
)
RANK_WEIGHT = 0.13, -0.50, -0.77, -1.10, -1.46, -1.56, -1.72, -2.06
RIVAL_SHARE_WEIGHT = -2.38, -2.95, -2.55, -1.93
RIVAL_RANK_WEIGHT = 0.0, -0.43, -0.95, -1.24, -1.42, -1.87, -1.98, -1.91
# By rank and share: the probability of a rival and its kind; and of a continuation, by its key's length before.
RIVAL_KINDS = [
    [(sigmoid(RIVAL_SHARE_WEIGHT[min(share, 3)] + weight), (rank, share)) for share in range(SHARES)]
    for rank, weight in enumerate(RIVAL_RANK_WEIGHT)
]
KINDS = [
    [
        [(sigmoid(by_share + weight), (order, rank, share)) for share, by_share in enumerate(by_shares)]
        for rank, weight in enumerate(RANK_WEIGHT)
    ]
    for order, by_shares in enumerate(SHARE_WEIGHT)
]


class Predictions(NamedTuple):
    """The target's most likely next tokens, best first, and the probability of each among them, rounded down."""

    tokens: tuple[int, ...]
    shares: tuple[int, ...]


# By the last 1, 2 and 3 tokens of each node of a request's trees: what the target predicted after them.
Recycled: TypeAlias = dict[tuple[int, ...], Predictions]


class Context(NamedTuple):
    """A node's last tokens; at the root also the predictions that it was chosen from."""

    recycled: Recycled
    tail: tuple[int, ...]
    rivals: Predictions | None = None


class RecyclingSource(Source):
    """Continues each node by what the target last predicted after the same one to three tokens.

    It learns from every verified node, the rejected ones too.
    """

    usual_trust = 0.65

    def __init__(self) -> None:
        self._roots: dict[int, Context] = {}  # by request id

    def observe(self, step: Step) -> None:
        before, self._roots = self._roots, {}
        trees = read_trees(step.logits, step.tree)
        rows = zip(step.request_ids, step.kept, step.sequences, step.path, trees, strict=True)
        for request_id, place, text, path, (tokens, parents, predictions) in rows:
            recycled = Recycled() if place is None else before[request_id].recycled
            learn(recycled, text[-ORDERS - len(path) : -len(path) - 1], tokens, parents, predictions)
            self._roots[request_id] = Context(recycled, tuple(text[-ORDERS:]), predictions[path[-1]])

    def start(self, request_id: int) -> Context:
        return self._roots[request_id]

    def follow(self, state: Context, token: int) -> Context:
        return Context(state.recycled, (*state.tail, token)[-ORDERS:])

    def continuations(self, state: Context) -> list[Named]:
        recycled, tail, rivals = state
        named: list[Named] = []
        for order in range(len(tail), 0, -1):
            if (predictions := recycled.get(tail[-order:])) is not None:
                pairs, kinds = zip(*predictions, strict=True), KINDS[order]
                named = [(token, *kinds[rank][share]) for rank, (token, share) in enumerate(pairs)]
                break
        if rivals is not None:
            pairs, last = zip(*rivals, strict=True), tail[-1]
            named += [(token, *RIVAL_KINDS[rank][share]) for rank, (token, share) in enumerate(pairs) if token != last]
        return named


def learn(
    recycled: Recycled,
    text: Sequence[int],
    tokens: Sequence[int],
    parents: Sequence[int],
    predicted: Sequence[Predictions],
) -> None:
    """Keep what was predicted after the nodes of a tree. text: the last tokens before its root."""
    tails: list[tuple[int, ...]] = []
    for token, parent, predictions in zip(tokens, parents, predicted, strict=True):
        tails.append((*(tails[parent] if tails else text), token)[-ORDERS:])
        for order in range(1, len(tails[-1]) + 1):
            key = tails[-1][-order:]
            recycled.pop(key, None)  # the newest key is the last one
            recycled[key] = predictions
    while len(recycled) > KEYS:
        del recycled[next(iter(recycled))]


def read_trees(logits: Tensor, tree: Tree) -> Iterator[tuple[list[int], list[int], list[Predictions]]]:
    """Each row's tokens, parents and predictions, by logits [B, N, V]. A GPU is waited for once."""
    tree = tree.to(logits.device)  # where it is already, but for a prompt's last token
    # A GPU would have to be waited for to leave padding out; a single row has none, so nothing needs to be copied.
    leaves_out = tree.batch > 1 and not waits(logits) and not bool(tree.real.all())
    ids, values = top_tokens(logits[tree.real] if leaves_out else logits, KEPT_RANKS, normalized=False)
    found = torch.cat([ids.double(), values.double()], dim=-1)  # which holds ids, too
    if leaves_out:
        every = found.new_zeros(*tree.tokens.shape, found.shape[-1])
        every[tree.real], found = found, every
    places = torch.stack([tree.tokens, tree.parents, tree.sizes[:, None].expand_as(tree.tokens)], dim=2)
    for nodes in read(torch.cat([places, found], dim=2)).tolist():
        size, ranks = int(nodes[0][2]), ids.shape[-1]
        predictions = [
            Predictions(tuple(map(int, node[3 : 3 + ranks])), find_shares(node[3 + ranks :])) for node in nodes[:size]
        ]
        yield [int(node[0]) for node in nodes[:size]], [int(node[1]) for node in nodes[:size]], predictions


def find_shares(logits: Sequence[float]) -> tuple[int, ...]:
    """The probabilities among the best logits, in `SHARES` steps. Those of a rejected node may be NaN: 0."""
    best = logits[0]
    weights = [exp(each - best) if -inf < best < inf and each <= best else 0.0 for each in logits]
    total = sum(weights) or 1.0
    return tuple(min(SHARES - 1, int(SHARES * weight / total)) for weight in weights)
