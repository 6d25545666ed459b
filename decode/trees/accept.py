"""Accept: choose the path down a verified tree, and the bonus token after it.

All nodes are judged together, without a wait or a loop over rows, on a GPU and at temperature 0. With logits
processors, and to sample on a CPU, trees are walked node by node (`decode.trees.walk`). The tokens are the same.

Shapes: B rows, N nodes, L levels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from decode.devices.attention import HALVES
from decode.devices.backend import find_backend
from decode.devices.transfer import copy_packed, read, waits
from decode.trees.noise import ACCEPTANCE, KEY_NAMES, TEXT, Noise, Texts, find_keys, make_exponential
from decode.trees.rejection import judge_chains
from decode.trees.sampling import NO_TOKEN, Sampling, group_rows
from decode.trees.tree import Tree
from decode.trees.walk import accept_processed_chains, walk

WRONG_TREE = -2  # instead of a bonus token
EPSILON, DELTA = 0.09, 0.3  # Medusa's defaults
MOST = 1 << 27  # probabilities that are computed at once: a gigabyte


@dataclass(frozen=True)
class Accepted:
    """What was accepted in each row."""

    path: list[list[int]]  # nodes, root first
    tokens: list[list[int]]  # of these nodes
    bonus: list[int]  # the token after the path; NO_TOKEN where its logits are no numbers, WRONG_TREE for a wrong tree
    sizes: list[int]  # nodes of the tree


AcceptanceRule: TypeAlias = Callable[[Tree, Tensor, Sampling, Texts, Noise | None], Accepted]


def accept_rows(
    rule: AcceptanceRule, tree: Tree, logits: Tensor, samplings: Sequence[Sampling], texts: Texts, noise: Noise
) -> Accepted:
    """Accept the trees of rows that each have a sampling of their own. Other arguments as in `accept`."""
    if len(samplings) == 1 or len(groups := group_rows(samplings)) == 1:
        return rule(tree, logits, samplings[0], texts, noise)
    ids, parts = [*texts], dict[int, tuple[Any, ...]]()
    for sampling, rows in groups:
        some = {ids[row]: texts[ids[row]] for row in rows}
        index = copy_packed({"rows": torch.tensor(rows)}, logits.device)["rows"]
        keys = {name: noise[name][index] for name in KEY_NAMES.values() if name in noise}
        accepted = rule(tree.select(index), logits[index], sampling, some, keys)
        parts.update(zip(rows, zip(*vars(accepted).values(), strict=True), strict=True))
    return Accepted(*map(list, zip(*(parts[row] for row in range(len(ids))), strict=True)))


def accept(tree: Tree, logits: Tensor, sampling: Sampling, texts: Texts, noise: Noise | None = None) -> Accepted:
    """Choose each row's path by the rule for this kind of draft. All these rules are lossless.

    logits [B, N, V]; texts: of all rows, in order. noise: what `find_keys` would make.
    Deterministic drafts are walked. Sampled chains are accepted by block verification (`decode.trees.rejection`).
    """
    tree, is_sampled = tree.to(logits.device), tree.q is not None
    if not sampling.processors and (sampling.greedy or is_sampled or waits(logits)):
        keys = {
            KEY_NAMES[each]: find_keys(each, tree.width, sampling.seed, texts, logits.device, noise)
            for each in choose_streams(tree, sampling)
        }
        return unpack(pack(tree, *accept_at_once(tree, logits, sampling, keys)))
    rule = accept_processed_chains if is_sampled else walk
    return unpack(pack(tree, *rule(tree, logits, sampling, texts, noise)))


def choose_streams(tree: Tree, sampling: Sampling) -> tuple[int, ...]:
    """The streams of noise that accepting a tree needs. None at temperature 0: noise decides nothing there."""
    if sampling.greedy:
        return ()
    return (TEXT,) if tree.q is None else (TEXT, ACCEPTANCE)


def accept_at_once(
    tree: Tree, logits: Tensor, sampling: Sampling, noise: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The nodes [B, N] bool on each accepted path, and the bonus tokens [B].

    noise: the keys [B, >= N] of `choose_streams`, by `KEY_NAMES`. Without logits processors.
    """
    if tree.q is not None:
        judged = [_judge(tree, rows, logits, sampling, noise) for rows in _split_rows(logits)]
        return torch.cat([part[0] for part in judged]), torch.cat([part[1] for part in judged])
    if not sampling.greedy:
        return follow(tree, draw_all(tree, logits, sampling, noise[KEY_NAMES[TEXT]]))
    # In a step of fixed shape all nodes count. Without padding, the logits need not be copied.
    if waits(logits) or torch.compiler.is_compiling() or bool(tree.real.all()):
        return follow(tree, choose_greedily(logits))
    chosen = torch.zeros_like(tree.tokens)
    chosen[tree.real] = choose_greedily(logits[tree.real])
    return follow(tree, chosen)


def draw_all(tree: Tree, logits: Tensor, sampling: Sampling, keys: Tensor) -> Tensor:
    """The target's token after each node [B, N], NO_TOKEN where the logits [B, N, V] are NaN or infinite.

    Level by level, as `decode.trees.walk` does it, a GPU would make some fifty launches a level.
    keys [B, >= L]: of each level's position, from `noise.row_keys`; nodes of one level share their noise. The tokens
    are those that `decode.trees.walk.draw` samples one node at a time. Without logits processors.
    """
    keys = keys[:, : tree.height + 1]
    return torch.cat([_draw(tree.depth[rows], logits[rows], sampling, keys[rows]) for rows in _split_rows(logits)])


def _split_rows(logits: Tensor) -> list[slice]:
    """So many rows of logits [B, N, V] at a time that their probabilities fit into memory."""
    size = max(1, MOST // logits[0].numel())
    return [slice(begin, begin + size) for begin in range(0, len(logits), size)]


def _judge(
    tree: Tree, rows: slice, logits: Tensor, sampling: Sampling, noise: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """`decode.trees.rejection.judge_chains` for some rows."""
    assert tree.q is not None
    none = torch.zeros_like(tree.tokens)
    keys, text_keys = (noise.get(KEY_NAMES[stream], none)[rows] for stream in (ACCEPTANCE, TEXT))
    p = sampling.probabilities(logits[rows].flatten(0, 1)).view(logits[rows].shape)
    return judge_chains(tree.tokens[rows], tree.real[rows], tree.q[rows], p, keys, text_keys)


def _draw(depth: Tensor, logits: Tensor, sampling: Sampling, keys: Tensor) -> Tensor:
    p = sampling.probabilities(logits.flatten(0, 1)).view(logits.shape)  # [B, N, V]
    noise = make_exponential(keys.flatten(), torch.arange(p.shape[2], device=p.device)).view(*keys.shape, -1)
    rows = torch.arange(len(depth), device=p.device)[:, None]
    noise = noise[rows, depth.clamp(max=keys.shape[1] - 1)]  # [B, N, V]; padding may be deeper
    drawn = torch.div(p, noise, out=noise).argmax(dim=2)
    # Probabilities are all NaN or none is.
    return torch.where(p[:, :, 0].isnan(), NO_TOKEN, drawn)


def choose_greedily(logits: Tensor) -> Tensor:
    """The most likely token [...] by logits [..., V]; NO_TOKEN if its logit is NaN or infinite."""
    if logits.dtype in HALVES and not waits(logits):  # a CPU is slow at half precision
        logits = logits.float()
    find = find_backend(logits.device).top_tokens
    if find is not None and (found := find(logits, 1, False)) is not None:  # of equals the first, as `argmax`
        return torch.where(found[1].isfinite(), found[0], NO_TOKEN)[..., 0]
    chosen = logits.argmax(dim=-1, keepdim=True)  # NaN counts as the largest
    return torch.where(logits.gather(-1, chosen).isfinite(), chosen, NO_TOKEN)[..., 0]


def follow(tree: Tree, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes [B, N] bool on the path of the tokens `chosen` [B, N], and the token [B] after it."""
    if tree.width == 1:
        return torch.ones_like(tree.tokens, dtype=torch.bool), chosen[:, 0]
    if tree.is_chain:
        wrong = ~tree.real
        wrong[:, 1:] |= chosen[:, :-1] != tree.tokens[:, 1:]
        on_path = wrong.cumsum(dim=1) == 0
        last = on_path.sum(dim=1, keepdim=True) - 1
        return on_path, chosen.gather(1, last)[:, 0]
    wrong = chosen.gather(1, tree.parents.clamp(min=0)) != tree.tokens
    wrong[:, 0] = False
    wrong |= ~tree.real
    reached = ~(tree.ancestors & wrong[:, None]).any(dim=2)  # [B, N]
    last = torch.where(reached, tree.depth, -1).argmax(dim=1)
    on_path = tree.ancestors[torch.arange(len(last), device=last.device), last]
    return on_path, chosen.gather(1, last[:, None])[:, 0]


def accept_lossily(
    tree: Tree, logits: Tensor, sampling: Sampling, texts: Texts, noise: Noise | None = None
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
    return unpack(pack(tree, tree.ancestors[row, last], bonus))


def pack(tree: Tree, on_path: Tensor, bonus: Tensor) -> Tensor:
    """What `unpack` reads, [B, N + 2]."""
    if tree.wrong is not None:
        bonus = torch.where(tree.wrong, WRONG_TREE, bonus)
    return torch.cat([torch.where(on_path, tree.tokens, -1), bonus[:, None], tree.sizes[:, None]], dim=1)


def unpack(packed: Tensor) -> Accepted:
    """From each row's tokens (-1: a node that was not accepted), its bonus token and its number of nodes [B, N + 2].

    Reading them is the only synchronization of a step.
    """
    rows = read(packed).tolist()
    path = [[node for node, token in enumerate(row[:-2]) if token >= 0] for row in rows]
    tokens = [[token for token in row[:-2] if token >= 0] for row in rows]
    return Accepted(path, tokens, [row[-2] for row in rows], [row[-1] for row in rows])
