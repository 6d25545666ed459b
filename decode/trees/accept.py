"""Accept: choose the path down a verified tree, and the bonus token after it.

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from decode.devices.transfer import Upload, copy_packed, read, waits
from decode.trees.at_once import accept_at_once, can_accept_at_once, choose_streams
from decode.trees.noise import ACCEPTANCE, KEY_NAMES, TEXT, gumbel_max, row_keys
from decode.trees.rejection import judge_chains
from decode.trees.sampling import NO_TOKEN, Sampling, group_rows
from decode.trees.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """What was accepted in each row."""

    path: list[list[int]]  # nodes, root first
    tokens: list[list[int]]  # of these nodes
    bonus: list[int]  # the token after the path; NO_TOKEN where its logits are no numbers, WRONG_TREE for a wrong tree
    sizes: list[int]  # nodes of the tree

    def select(self, rows: Sequence[int]) -> Accepted:
        """The same for some rows only."""
        return Accepted(*([part[row] for row in rows] for part in vars(self).values()))


WRONG_TREE = -2  # instead of a bonus token
EPSILON, DELTA = 0.09, 0.3  # Medusa's defaults

Texts: TypeAlias = Mapping[int, Sequence[int]]  # by request id, which keys the noise: tokens up to the root, included
Noise: TypeAlias = Upload | dict[str, Tensor]  # may have the keys of streams of noise, by `KEY_NAMES`
AcceptanceRule: TypeAlias = Callable[[Tree, Tensor, Sampling, Texts, Noise | None], Accepted]


def accept_rows(
    rule: AcceptanceRule, tree: Tree, logits: Tensor, samplings: Sequence[Sampling], texts: Texts, noise: Noise
) -> Accepted:
    """Accept the trees of rows that each have a sampling of their own. Other arguments as in `accept`."""
    if len(groups := group_rows(samplings)) == 1:
        return rule(tree, logits, samplings[0], texts, noise)
    ids, parts = [*texts], dict[int, Accepted]()
    for sampling, rows in groups:
        some = {ids[row]: texts[ids[row]] for row in rows}
        keys = {name: noise[name][rows] for name in KEY_NAMES.values() if name in noise}
        accepted = rule(tree.select(rows), logits[rows], sampling, some, keys)
        parts.update((row, accepted.select([index])) for index, row in enumerate(rows))
    columns = zip(*(vars(parts[row]).values() for row in range(len(ids))), strict=True)
    return Accepted(*([each for (each,) in column] for column in columns))


def accept(tree: Tree, logits: Tensor, sampling: Sampling, texts: Texts, upload: Noise | None = None) -> Accepted:
    """Choose each row's path by the rule for this kind of draft. All these rules are lossless.

    logits [B, N, V]; texts: of all rows, in order. upload: may hold the noise of `find_keys`.
    Deterministic drafts are walked. Sampled chains are accepted by block verification (`decode.trees.rejection`).
    """
    tree = tree.to(logits.device)
    if can_accept_at_once(tree, sampling):
        streams = choose_streams(tree, sampling)
        noise = {
            KEY_NAMES[each]: find_keys(each, tree.width, sampling, texts, logits.device, upload) for each in streams
        }
        return read_accepted(tree, *accept_at_once(tree, logits, sampling, noise))
    if tree.q is not None:
        return accept_processed_chains(tree, logits, sampling, texts, upload)
    return walk(tree, logits, sampling, texts, upload)


def find_keys(
    stream: int, count: int, sampling: Sampling, texts: Texts, device: torch.device, upload: Noise | None
) -> Tensor:
    """The keys [B, >= count] of a stream of noise after these texts: what the step has uploaded, or made now."""
    name = KEY_NAMES[stream]
    if upload is not None and name in upload:
        return upload[name]
    made = row_keys(sampling.seed or 0, [*texts], [*map(len, texts.values())], count, stream)
    return copy_packed({name: made}, device)[name]


def walk(tree: Tree, logits: Tensor, sampling: Sampling, texts: Texts, upload: Noise | None = None) -> Accepted:
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
    seeds = find_keys(TEXT, tree.width, sampling, texts, device, upload)
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
    return read_accepted(tree, on_path, bonus)


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
    tree: Tree, logits: Tensor, sampling: Sampling, texts: Texts, upload: Noise | None = None
) -> Accepted:
    """Accept sampled chains by probabilities that depend on logits processors, which need each node's own prefix."""
    assert tree.q is not None
    p = torch.stack([_probe(tree, row, logits[row], sampling, *text) for row, text in enumerate(texts.items())])
    width, device = tree.width, logits.device
    keys = (find_keys(stream, width, sampling, texts, device, upload) for stream in (ACCEPTANCE, TEXT))
    return read_accepted(tree, *judge_chains(tree.tokens, tree.real, tree.q, p, *keys))


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


def accept_lossily(
    tree: Tree, logits: Tensor, sampling: Sampling, texts: Texts, upload: Noise | None = None
) -> Accepted:
    """LOSSY: Medusa's typical acceptance (Cai et al. 2024, equation 1), the longest path of plausible tokens.

    A draft token x passes if p(x) > min(EPSILON, DELTA exp(-entropy of p)), p being the target's probabilities after
    its parent. Among equally long paths the most probable one wins; the bonus token is the most probable one. Nothing
    is random, so the text is not a sample from the target and depends on the proposer. At temperature 0 this is greedy
    decoding. Arguments as in `accept`; the last two are ignored.
    """
    tree = tree.to(logits.device)
    p = sampling.probabilities(logits.flatten(0, 1)).view(logits.shape)  # [B, N, V]
    threshold = (DELTA * torch.exp(torch.special.entr(p).sum(dim=-1).neg())).clamp(max=EPSILON)  # [B, N]
    parents = tree.parents.clamp(min=0)
    p_node = p.flatten(1).gather(1, parents * logits.shape[2] + tree.tokens)  # [B, N]
    wrong = ~(p_node > threshold.gather(1, parents)) | ~tree.real  # NaN is wrong
    wrong[:, 0], p_node[:, 0] = False, 1.0
    reached = ~(tree.ancestors & wrong[:, None]).any(dim=2)
    log_p = (tree.ancestors * p_node.clamp(min=1e-300).log()[:, None]).sum(dim=2)
    longest = tree.depth == torch.where(reached, tree.depth, -1).amax(dim=1, keepdim=True)
    last = torch.where(reached & longest, log_p, -torch.inf).argmax(dim=1)
    row = torch.arange(tree.batch, device=last.device)
    after = p[row, last]  # [B, V]
    bonus = torch.where(after[:, 0].isnan(), NO_TOKEN, after.argmax(dim=1))
    return read_accepted(tree, tree.ancestors[row, last], bonus)


def read_accepted(tree: Tree, on_path: Tensor, bonus: Tensor) -> Accepted:
    """Read the accepted path, its tokens and the bonus token."""
    return unpack(pack(tree.tokens, tree.sizes, tree.wrong, on_path, bonus))


def pack(tokens: Tensor, sizes: Tensor, wrong: Tensor | None, on_path: Tensor, bonus: Tensor) -> Tensor:
    """What `unpack` reads, [B, N + 2]."""
    if wrong is not None:
        bonus = torch.where(wrong, WRONG_TREE, bonus)
    return torch.cat([torch.where(on_path, tokens, -1), bonus[:, None], sizes[:, None]], dim=1)


def unpack(packed: Tensor) -> Accepted:
    """From each row's tokens (-1: a node that was not accepted), its bonus token and its number of nodes [B, N + 2].

    Reading them is the only synchronization of a step.
    """
    rows = read(packed).tolist()
    path = [[node for node, token in enumerate(row[:-2]) if token >= 0] for row in rows]
    tokens = [[token for token in row[:-2] if token >= 0] for row in rows]
    return Accepted(path, tokens, [row[-2] for row in rows], [row[-1] for row in rows])
