"""Accept: choose the path down a verified tree, and the bonus token after it.

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.noise import ACCEPTANCE, KeyedDice, gumbel_max, inverse_cdf, keys, uniforms
from decode.rejection import RULES, Drafted, block_batch
from decode.sampling import Sampling, widen
from decode.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """Per row: the nodes of the accepted path (root first), their tokens, the token after them, the tree's size."""

    path: list[list[int]]
    tokens: list[list[int]]
    bonus: list[int]
    sizes: list[int]

    def select(self, rows: Sequence[int]) -> Accepted:
        """The same for some rows only."""
        return Accepted(*([part[row] for row in rows] for part in vars(self).values()))


def accept(
    tree: Tree, logits: Tensor, sampling: Sampling, rows: Sequence[int], sequences: Sequence[Sequence[int]]
) -> Accepted:
    """Choose a path by the rule that fits how the tree was drafted; each is lossless.

    logits [B, N, V]; rows: the number of each prompt, which keys its noise; sequences: each row's tokens up to and
    including the root. Deterministic drafts are walked, a sampled chain is verified as a block, any other tree with
    sampled nodes by traversal.
    """
    tree = tree.to(logits.device)
    if tree.q is not None:
        verify = accept_chain if tree.is_chain and tree.sampled is None else accept_sampled_tree
        return verify(tree, logits, sampling, rows, sequences)
    if sampling.greedy and not sampling.processors:
        return accept_greedily(tree, logits)
    return walk(tree, logits, sampling, rows, sequences)


def accept_greedily(tree: Tree, logits: Tensor) -> Accepted:
    """The walk at temperature 0: all nodes are judged at once."""
    # A CPU is slow at half precision; a GPU would need room for all logits once more.
    drawn = (widen(logits) if logits.device.type == "cpu" else logits).argmax(dim=-1)  # [B, N]
    wrong = drawn.gather(1, tree.parents.clamp(min=0)) != tree.tokens
    wrong[:, 0] = False
    wrong |= ~tree.real
    reached = ~(tree.ancestors & wrong[:, None]).any(dim=2)  # [B, N]
    last = torch.where(reached, tree.depth, -1).argmax(dim=1)
    on_path = tree.ancestors[torch.arange(tree.batch, device=last.device), last]
    return _to_host(tree, on_path, drawn.gather(1, last[:, None])[:, 0])


def walk(
    tree: Tree, logits: Tensor, sampling: Sampling, rows: Sequence[int], sequences: Sequence[Sequence[int]]
) -> Accepted:
    """Draw the target's token at each visited node and go on while it is a child.

    For a tree that was drafted deterministically no rule accepts more (the chance of a path is the target's own), and
    the tokens drawn are those that plain decoding would draw with the same noise. Only visited nodes are processed:
    one law a level and row.
    """
    device = logits.device
    row = torch.arange(tree.batch, device=device)
    node = torch.zeros_like(row)
    alive = torch.ones_like(row, dtype=torch.bool)
    on_path = torch.zeros_like(tree.parents, dtype=torch.bool)
    bonus = torch.zeros_like(row)
    prefixes: list[Tensor | None] = []  # None once a row has ended: processors are not asked beyond its text
    if sampling.processors:
        prefixes = [torch.tensor(sequence, device=device) for sequence in sequences]
    levels = range(tree.height + 1)
    table = [
        [(sampling.seed, number, len(sequence) + level) for level in levels]
        for number, sequence in zip(rows, sequences, strict=True)
    ]
    seeds = keys(table, device)
    for level in levels:
        on_path[row, node] |= alive
        drawn = draw(logits[row, node], sampling, prefixes, rows, seeds[:, level])
        bonus = torch.where(alive, drawn, bonus)
        child = (tree.parents == node[:, None]) & (tree.tokens == drawn[:, None]) & tree.real
        alive = alive & child.any(dim=1)
        node = torch.where(alive, child.int().argmax(dim=1), node)
        if prefixes:
            going = zip(prefixes, drawn, alive.tolist(), strict=True)
            prefixes = [
                torch.cat([prefix, token[None]]) if on and prefix is not None else None for prefix, token, on in going
            ]
        if device.type == "cpu" and not bool(alive.any()):  # on a GPU the look would cost more than it saves
            break
    return _to_host(tree, on_path, bonus)


def draw(
    logits: Tensor, sampling: Sampling, prefixes: Sequence[Tensor | None], rows: Sequence[int], seeds: Tensor
) -> Tensor:
    """A token a row, [B]: from laws of logits [B, V], as `Sampling.law` makes them, with the noise of seeds [B].

    On a CPU row by row: together, their laws and noise in float64 are larger than its caches.
    """
    if logits.device.type != "cpu":
        return gumbel_max(sampling.probabilities(logits, prefixes, rows), seeds)
    drawn = []
    for row in range(len(logits)):
        one = slice(row, row + 1)
        law = sampling.probabilities(logits[one], prefixes[one], rows[one])
        tokens = law[0].nonzero()[:, 0]  # noise for the others would be made in vain
        drawn.append(tokens[gumbel_max(law[:, tokens], seeds[one], tokens)])
    return torch.cat(drawn)


def accept_chain(
    tree: Tree, logits: Tensor, sampling: Sampling, rows: Sequence[int], sequences: Sequence[Sequence[int]]
) -> Accepted:
    """Judge chains that were drawn at random as blocks, all rows at once."""
    assert tree.q is not None
    width = logits.shape[1]
    if sampling.processors:
        p = _chain_laws(tree, logits, sampling, rows, sequences)
    else:
        p = sampling.probabilities(logits.flatten(0, 1)).view(logits.shape)
    # Keyed by the step, not by each position: the verdict on a guess tells of noise at guesses that it rejects.
    table = [
        [(sampling.seed, row, len(sequence), ACCEPTANCE, number) for number in range(width)]
        for row, sequence in zip(rows, sequences, strict=True)
    ]
    noise = uniforms(table, logits.device)
    accepted, weights = block_batch(tree.tokens, tree.sizes, p, tree.q.double(), noise)
    on_path = torch.arange(width, device=logits.device) <= accepted[:, None]
    return _to_host(tree, on_path, inverse_cdf(weights, noise[:, 0]))  # a block leaves the first number for the bonus


def _chain_laws(
    tree: Tree, logits: Tensor, sampling: Sampling, rows: Sequence[int], sequences: Sequence[Sequence[int]]
) -> Tensor:
    """The law after each node, [B, N, V]. Behind a guess that processors forbid, where no law is needed, any will do:
    a grammar need not have an answer there.
    """
    chains = [_Prefix(tree, place, sequence) for place, sequence in enumerate(sequences)]
    allowed, laws = torch.ones_like(tree.real[:, 0]), list[Tensor]()
    for node in range(tree.width):
        if laws:
            allowed = allowed & (laws[-1].gather(1, tree.tokens[:, node, None])[:, 0] > 0) & (tree.sizes > node)
        prefixes = [chain(node) if on else None for chain, on in zip(chains, allowed.tolist(), strict=True)]
        laws.append(sampling.probabilities(logits[:, node], prefixes, rows))
    return torch.stack(laws, dim=1)


def accept_sampled_tree(
    tree: Tree,
    logits: Tensor,
    sampling: Sampling,
    rows: Sequence[int],
    sequences: Sequence[Sequence[int]],
    rule: str = "traversal",
) -> Accepted:
    """Judge trees with nodes drawn at random, row by row, by one of `decode.rejection.RULES`."""
    assert tree.q is not None
    sampled = torch.ones_like(tree.real) if tree.sampled is None else tree.sampled
    paths, bonuses = [], []
    for place, (number, sequence) in enumerate(zip(rows, sequences, strict=True)):
        size, prefix = int(tree.sizes[place]), _Prefix(tree, place, sequence)

        def p(node: int, place: int = place, prefix: _Prefix = prefix, number: int = number) -> Tensor:
            return sampling.probabilities(logits[place, node][None], [prefix(node)], [number])[0]

        def q(node: int, laws: Tensor = tree.q[place]) -> Tensor:
            return laws[node].double()

        drafted = Drafted(
            tokens=tree.tokens[place, :size].tolist(),
            parents=tree.parents[place, :size].tolist(),
            sampled=sampled[place, :size].tolist(),
            p=p,
            q=q,
        )
        path, bonus = RULES[rule](drafted, KeyedDice(sampling.seed, number, len(sequence)))
        paths.append(path)
        bonuses.append(bonus)
    chosen = [tree.tokens[place, path].tolist() for place, path in enumerate(paths)]
    return Accepted(paths, chosen, bonuses, tree.sizes.tolist())


class _Prefix:
    """The tokens up to and including a node of one row's tree."""

    def __init__(self, tree: Tree, place: int, sequence: Sequence[int]) -> None:
        self.sequence = torch.tensor(sequence, device=tree.tokens.device)
        self.tokens, self.ancestors = tree.tokens[place], tree.ancestors[place]

    def __call__(self, node: int) -> Tensor:
        return torch.cat([self.sequence[:-1], self.tokens[self.ancestors[node]]])


def _to_host(tree: Tree, on_path: Tensor, bonus: Tensor) -> Accepted:
    """The step's one look at the device: who was accepted, with which tokens, and what comes after."""
    packed = torch.cat([torch.where(on_path, tree.tokens, -1), bonus[:, None], tree.sizes[:, None]], dim=1).tolist()
    path = [[node for node, token in enumerate(row[:-2]) if token >= 0] for row in packed]
    tokens = [[token for token in row[:-2] if token >= 0] for row in packed]
    return Accepted(path, tokens, [row[-2] for row in packed], [row[-1] for row in packed])
