"""Accept: choose the path down a verified tree, and the bonus token after it.

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from decode.noise import ACCEPTANCE, KeyedRandomness, gumbel_max, inverse_cdf, keys, uniforms
from decode.rejection import SampledTree, accept_by_block, accept_by_traversal
from decode.sampling import Sampling, upcast_half
from decode.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """What was accepted in each row."""

    path: list[list[int]]  # nodes, root first
    tokens: list[list[int]]  # of these nodes
    bonus: list[int]  # the token after the path
    sizes: list[int]  # nodes of the tree

    def select(self, rows: Sequence[int]) -> Accepted:
        """The same for some rows only."""
        return Accepted(*([part[row] for row in rows] for part in vars(self).values()))


Texts: TypeAlias = Mapping[int, Sequence[int]]  # by request id, which keys the noise: tokens up to the root, included
AcceptanceRule: TypeAlias = Callable[[Tree, Tensor, Sampling, Texts], Accepted]


def accept(tree: Tree, logits: Tensor, sampling: Sampling, texts: Texts) -> Accepted:
    """Choose each row's path by the rule for this kind of draft. All rules are lossless.

    logits [B, N, V]; texts: of all rows, in order.
    Deterministic drafts are walked. Sampled chains are accepted by block. Other trees with sampled nodes, and chains if
    there are logits processors, are accepted by traversal: it never calls a processor after a token that it forbids,
    where a grammar may raise.
    """
    tree = tree.to(logits.device)
    if tree.q is not None:
        by_block = tree.is_chain and tree.sampled is None and not sampling.processors
        rule = accept_chain if by_block else accept_sampled_tree
        return rule(tree, logits, sampling, texts)
    if sampling.greedy and not sampling.processors:
        return accept_greedily(tree, logits)
    return walk(tree, logits, sampling, texts)


def accept_greedily(tree: Tree, logits: Tensor) -> Accepted:
    """`walk` at temperature 0, for all nodes at once."""
    # A CPU is slow at half precision. A GPU would need the memory of all logits once more.
    chosen = (upcast_half(logits) if logits.device.type == "cpu" else logits).argmax(dim=-1)  # [B, N]
    wrong = chosen.gather(1, tree.parents.clamp(min=0)) != tree.tokens
    wrong[:, 0] = False
    wrong |= ~tree.real
    reached = ~(tree.ancestors & wrong[:, None]).any(dim=2)  # [B, N]
    last = torch.where(reached, tree.depth, -1).argmax(dim=1)
    on_path = tree.ancestors[torch.arange(tree.batch, device=last.device), last]
    return read_accepted(tree, on_path, chosen.gather(1, last[:, None])[:, 0])


def walk(tree: Tree, logits: Tensor, sampling: Sampling, texts: Texts) -> Accepted:
    """Draw the target's token at each visited node, and descend while a child has it.

    No rule accepts more of a deterministic draft: a path is accepted with the target's own probability. The tokens are
    those that plain decoding draws from the same noise. Probabilities are computed for visited nodes only.
    """
    device = logits.device
    row = torch.arange(tree.batch, device=device)
    node = torch.zeros_like(row)
    alive = torch.ones_like(row, dtype=torch.bool)
    on_path = torch.zeros_like(tree.parents, dtype=torch.bool)
    bonus = torch.zeros_like(row)
    prefixes: list[Tensor | None] = []  # None once a row has ended: processors see no prefix beyond its path
    if sampling.processors:
        prefixes = [torch.tensor(text, device=device) for text in texts.values()]
    levels = range(tree.height + 1)
    table = [[(sampling.seed, request_id, len(text) + level) for level in levels] for request_id, text in texts.items()]
    seeds = keys(table, device)
    for level in levels:
        on_path[row, node] |= alive
        drawn = draw(logits[row, node], sampling, prefixes, [*texts], seeds[:, level])
        bonus = torch.where(alive, drawn, bonus)
        child = (tree.parents == node[:, None]) & (tree.tokens == drawn[:, None]) & tree.real
        alive = alive & child.any(dim=1)
        node = torch.where(alive, child.int().argmax(dim=1), node)
        if prefixes:
            going = zip(prefixes, drawn, alive.tolist(), strict=True)
            prefixes = [
                torch.cat([prefix, token[None]]) if on and prefix is not None else None for prefix, token, on in going
            ]
        if device.type == "cpu" and not bool(alive.any()):  # on a GPU this would synchronize
            break
    return read_accepted(tree, on_path, bonus)


def draw(
    logits: Tensor, sampling: Sampling, prefixes: Sequence[Tensor | None], request_ids: Sequence[int], seeds: Tensor
) -> Tensor:
    """Sample a token [B] per row from logits [B, V], by `Sampling.probabilities` and the noise of seeds [B].

    On a CPU row by row: probabilities and noise of all rows in float64 exceed its caches.
    """
    if logits.device.type != "cpu":
        return gumbel_max(sampling.probabilities(logits, prefixes, request_ids), seeds)
    drawn = []
    for row in range(len(logits)):
        one = slice(row, row + 1)
        p = sampling.probabilities(logits[one], prefixes[one], request_ids[one])
        tokens = p[0].nonzero()[:, 0]  # no noise is needed for the others
        drawn.append(tokens[gumbel_max(p[:, tokens], seeds[one], tokens)])
    return torch.cat(drawn)


def accept_chain(tree: Tree, logits: Tensor, sampling: Sampling, texts: Texts) -> Accepted:
    """Block verification of sampled chains, all rows at once. Without logits processors."""
    assert tree.q is not None
    p = sampling.probabilities(logits.flatten(0, 1)).view(logits.shape)
    # Keyed by the step and not by each position: the next step must not reuse noise that rejected these draft tokens.
    table = [
        [(sampling.seed, request_id, len(text), ACCEPTANCE, node) for node in range(tree.width)]
        for request_id, text in texts.items()
    ]
    noise = uniforms(table, logits.device)
    accepted, weights = accept_by_block(tree.tokens, tree.sizes, p, tree.q.double(), noise)
    on_path = torch.arange(tree.width, device=logits.device) <= accepted[:, None]
    return read_accepted(tree, on_path, inverse_cdf(weights, noise[:, 0]))


def accept_sampled_tree(tree: Tree, logits: Tensor, sampling: Sampling, texts: Texts) -> Accepted:
    """Traversal verification of trees with sampled nodes, row by row."""
    path, bonus = [], []
    for row, (request_id, text) in enumerate(texts.items()):
        sampled_tree = _make_sampled_tree(tree, row, logits, sampling, request_id, text)
        nodes, token = accept_by_traversal(sampled_tree, KeyedRandomness(sampling.seed, request_id, len(text)))
        path.append(nodes)
        bonus.append(token)
    tokens = [tree.tokens[row, nodes].tolist() for row, nodes in enumerate(path)]
    return Accepted(path, tokens, bonus, tree.sizes.tolist())


def _make_sampled_tree(
    tree: Tree, row: int, logits: Tensor, sampling: Sampling, request_id: int, text: Sequence[int]
) -> SampledTree:
    """One row's tree for a rejection rule, which computes the target's probabilities only where it needs them."""
    assert tree.q is not None
    size, q, prefix = int(tree.sizes[row]), tree.q[row], _make_prefix(tree, row, text)
    return SampledTree(
        tokens=tree.tokens[row, :size].tolist(),
        parents=tree.parents[row, :size].tolist(),
        sampled=[True] * size if tree.sampled is None else tree.sampled[row, :size].tolist(),
        p=lambda node: sampling.probabilities(logits[row, node][None], [prefix(node)], [request_id])[0],
        q=lambda node: q[node].double(),
    )


def _make_prefix(tree: Tree, row: int, text: Sequence[int]) -> Callable[[int], Tensor]:
    """A function from a node to all tokens of its row up to the node, included."""
    before_root = torch.tensor(text, device=tree.tokens.device)[:-1]
    return lambda node: torch.cat([before_root, tree.tokens[row, tree.ancestors[row, node]]])


def read_accepted(tree: Tree, on_path: Tensor, bonus: Tensor) -> Accepted:
    """Read the accepted path, its tokens and the bonus token: the only synchronization of a step."""
    packed = torch.cat([torch.where(on_path, tree.tokens, -1), bonus[:, None], tree.sizes[:, None]], dim=1).tolist()
    path = [[node for node, token in enumerate(row[:-2]) if token >= 0] for row in packed]
    tokens = [[token for token in row[:-2] if token >= 0] for row in packed]
    return Accepted(path, tokens, [row[-2] for row in packed], [row[-1] for row in packed])
