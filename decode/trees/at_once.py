"""Accepting a tree at once: all its nodes are judged together, without a wait or a loop over rows.

A GPU accepts all trees this way unless there are logits processors. A CPU does so at temperature 0. Other trees are
accepted node by node in `decode.trees.accept`. The tokens are the same.

Shapes: B rows, N nodes, L levels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from decode.devices.transfer import waits
from decode.trees.noise import ACCEPTANCE, KEY_NAMES, TEXT, make_exponential
from decode.trees.rejection import judge_chains
from decode.trees.sampling import NO_TOKEN, Sampling, upcast_half
from decode.trees.tree import Tree

MOST = 1 << 27  # probabilities that are computed at once: a gigabyte


def can_accept_at_once(tree: Tree, sampling: Sampling) -> bool:
    """Whether a tree is accepted by `accept_at_once`."""
    is_cheap = waits(tree.tokens) or sampling.greedy or tree.q is not None
    return is_cheap and not sampling.processors


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
    if waits(logits) or torch.compiler.is_compiling():  # a step of fixed shape
        return follow(tree, choose_greedily(logits))
    if bool(tree.real.all()):  # without copying the logits
        return follow(tree, choose_greedily(upcast_half(logits)))  # a CPU is slow at half precision
    chosen = torch.zeros_like(tree.tokens)
    chosen[tree.real] = choose_greedily(upcast_half(logits[tree.real]))
    return follow(tree, chosen)


def draw_all(tree: Tree, logits: Tensor, sampling: Sampling, keys: Tensor) -> Tensor:
    """The target's token after each node [B, N], NO_TOKEN where the logits [B, N, V] are NaN or infinite.

    Level by level, as `decode.trees.accept.walk` does it, a GPU would make some fifty launches a level.
    keys [B, >= L]: of each level's position, from `noise.row_keys`; nodes of one level share their noise. The
    tokens are those that `decode.trees.accept.draw` samples one node at a time. Without logits processors.
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
