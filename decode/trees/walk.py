"""Accepting trees node by node: where logits processors need each node's own prefix, and to sample on a CPU.

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.devices.transfer import waits
from decode.trees.noise import ACCEPTANCE, TEXT, Noise, Texts, find_keys, gumbel_max
from decode.trees.rejection import judge_chains
from decode.trees.sampling import NO_TOKEN, Sampling
from decode.trees.tree import Tree


def walk(
    tree: Tree, logits: Tensor, sampling: Sampling, texts: Texts, noise: Noise | None = None
) -> tuple[Tensor, Tensor]:
    """Draw the target's token at each visited node, and descend while a child has it.

    Returns the nodes [B, N] bool on each path, and the bonus tokens [B]. Arguments as in `decode.trees.accept.accept`.

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
    seeds = find_keys(TEXT, tree.width, sampling.seed, texts, device, noise)
    for level in range(min(tree.height + 1, tree.width, seeds.shape[1])):  # nodes beyond the budget are padding
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
        if not waits(alive) and not bool(alive.any()):  # on a GPU this would synchronize
            break
    return on_path, bonus


def draw(
    logits: Tensor, sampling: Sampling, prefixes: Sequence[Tensor | None], request_ids: Sequence[int], seeds: Tensor
) -> Tensor:
    """Sample a token [B] per row from logits [B, V], by `Sampling.probabilities` and the noise of seeds [B].

    NO_TOKEN where the logits are NaN or infinite. On a CPU row by row: probabilities and noise of all rows in float64
    exceed its caches.
    """
    if waits(logits):
        p = sampling.probabilities(logits, prefixes, request_ids)
        return torch.where(p[:, 0].isnan(), NO_TOKEN, gumbel_max(p, seeds))
    drawn = []
    for row in range(len(logits)):
        one = slice(row, row + 1)
        p = sampling.probabilities(logits[one], prefixes[one], request_ids[one])
        tokens = p[0].nonzero()[:, 0]  # no noise is needed for the others
        token = tokens[gumbel_max(p[:, tokens], seeds[one], tokens)]
        drawn.append(torch.where(p[0, :1].isnan(), NO_TOKEN, token))
    return torch.cat(drawn)


def accept_processed_chains(
    tree: Tree, logits: Tensor, sampling: Sampling, texts: Texts, noise: Noise | None = None
) -> tuple[Tensor, Tensor]:
    """Accept sampled chains by probabilities that depend on logits processors, which need each node's own prefix."""
    assert tree.q is not None
    p = torch.stack([_probe(tree, row, logits[row], sampling, *text) for row, text in enumerate(texts.items())])
    width, device = tree.width, logits.device
    keys = (find_keys(stream, width, sampling.seed, texts, device, noise) for stream in (ACCEPTANCE, TEXT))
    return judge_chains(tree.tokens, tree.real, tree.q, p, *keys)


def _probe(tree: Tree, row: int, logits: Tensor, sampling: Sampling, request_id: int, text: Sequence[int]) -> Tensor:
    """The target's probabilities [N, V] after the nodes of one row's chain that can be accepted.

    Processors are never called after a token that the target cannot choose, where a grammar may raise.
    """
    p = torch.full_like(logits, 1 / logits.shape[1], dtype=torch.float64)  # of nodes that do not matter
    drafted = tree.tokens[row, 1 : int(tree.sizes[row])]
    prefix = torch.tensor(text, device=logits.device)
    for node in range(len(drafted) + 1):
        p[node] = sampling.probabilities(logits[node][None], [prefix], [request_id])[0]
        if node == len(drafted) or not bool(p[node, drafted[node]] > 0):
            break
        prefix = torch.cat([prefix, drafted[node][None]])
    return p
