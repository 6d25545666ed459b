"""Sampling the target's tokens after all nodes of a tree at once.

Level by level, as `decode.accept.walk` does it, a GPU would make some fifty launches a level.
Shapes: B rows, N nodes, L levels, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.noise import make_exponential
from decode.sampling import NO_TOKEN, Sampling
from decode.tree import Tree

MOST = 1 << 27  # probabilities that are computed at once: a gigabyte


def draw_all(tree: Tree, logits: Tensor, sampling: Sampling, keys: Tensor) -> Tensor:
    """The target's token after each node [B, N], NO_TOKEN where the logits [B, N, V] are NaN or infinite.

    keys [B, >= L]: of each level's position, from `decode.noise.row_keys`; nodes of one level share their noise. The
    tokens are those that `decode.cpu.draw.draw` samples one node at a time. Without logits processors.
    """
    size = max(1, MOST // (tree.width * logits.shape[2]))  # rows
    parts = [slice(begin, begin + size) for begin in range(0, tree.batch, size)]
    return torch.cat([_draw(tree.depth[rows], logits[rows], sampling, keys[rows, : tree.height + 1]) for rows in parts])


def _draw(depth: Tensor, logits: Tensor, sampling: Sampling, keys: Tensor) -> Tensor:
    p = sampling.probabilities(logits.flatten(0, 1)).view(logits.shape)  # [B, N, V]
    noise = make_exponential(keys.flatten(), torch.arange(p.shape[2], device=p.device)).view(*keys.shape, -1)
    rows = torch.arange(len(depth), device=p.device)[:, None]
    noise = noise[rows, depth]  # [B, N, V]
    drawn = torch.div(p, noise, out=noise).argmax(dim=2)
    # Probabilities are all NaN or none is.
    return torch.where(p[:, :, 0].isnan(), NO_TOKEN, drawn)
