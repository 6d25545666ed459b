"""The acceptance rule for sampled chains: it compares the target's p with the draft's q and stays unbiased.

Block verification (Sun et al., ICLR 2025, algorithm 2) accepts as much as any rule can. The emitted tokens have exactly
the target's distribution if each draft token was sampled from the `q` that the chain reports, after temperature, top-k
and top-p, and if no token is dropped because of its own value.

Shapes: B rows, N nodes (node 0 is the root), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.devices.transfer import waits
from decode.trees.noise import gumbel_max, inverse_cdf, to_uniforms
from decode.trees.sampling import NO_TOKEN


def judge_chains(
    tokens: Tensor, real: Tensor, q: Tensor, p: Tensor, keys: Tensor, text_keys: Tensor
) -> tuple[Tensor, Tensor]:
    """The nodes [B, N] bool on each accepted path, and the bonus tokens [B].

    tokens [B, N]; real [B, N]: which nodes are not padding; q, p [B, N, V]: the draft's and the target's probabilities
    after each node. A node whose p is NaN is the last of its chain, and the token after it is NO_TOKEN: that is as
    likely as in plain decoding. keys [B, >= N] of `noise.ACCEPTANCE`: a row uses them in order, one for each
    node that it tests, from the last one up, and one for the bonus token. text_keys [B, >= 1] of `noise.TEXT`:
    a row without draft tokens is plain decoding, whatever the other rows draft.
    """
    accept, weights = weigh_chains(tokens, real, q, p)
    tested = accept > 0
    tested[:, 0] = False  # the root is accepted if nothing else is
    before = tested.flip(1).cumsum(dim=1).flip(1) - tested.long()  # [B, N] tests before a node's own
    uniforms = to_uniforms(keys)
    accepted = tested & (uniforms.gather(1, before) < accept)
    node = torch.arange(tokens.shape[1], device=p.device)
    last = (accepted * node).amax(dim=1)  # [B]
    rows = torch.arange(len(p), device=p.device)
    used = (before + tested)[rows, last]
    bonus = inverse_cdf(weights[rows, last], uniforms[rows, used])
    bare = real.sum(dim=1) == 1
    if waits(p) or bool(bare.any()):  # on a GPU this would synchronize
        bonus = torch.where(bare, gumbel_max(p[:, 0], text_keys[:, 0]), bonus)
    return node <= last[:, None], torch.where(p[rows, last, 0].isnan(), NO_TOKEN, bonus)


def weigh_chains(tokens: Tensor, real: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """How probable it is that each node is accepted [B, N], if none after it was; and the weights [B, N, V] of the
    token after it, which need not sum to one. Arguments as in `judge_chains`.

    The path down to node i is right with p_i = min(1, p_{i-1} p(x_i) / q(x_i)). With S_i = sum (p_i p - q)+ after it,
    node i is accepted with probability S_i / (S_i + 1 - p_i), the last one with p_i. A draft token that q cannot have
    sampled ends the chain, as does a q that is NaN or infinite: `min(1, NaN)` would accept its token.
    """
    broken = p[:, :, :1].isnan()  # all of a node's probabilities are, or none is
    p = torch.where(broken, 1 / p.shape[2], p)
    q = q.double() / q.double().sum(dim=2, keepdim=True)
    following = torch.nn.functional.pad(tokens[:, 1:], (0, 1))[:, :, None]  # [B, N, 1]
    drafted = q.gather(2, following)
    is_followed = (drafted > 0) & drafted.isfinite() & ~broken
    is_followed[:, :-1] &= real[:, 1:, None]
    is_followed[:, -1] = False
    ratio = torch.where(is_followed, p.gather(2, following) / drafted, 0)[:, :, 0]  # [B, N]: of the next node
    paths = [torch.ones_like(ratio[:, 0])]
    for node in range(1, tokens.shape[1]):
        paths.append((paths[-1] * ratio[:, node - 1]).clamp(max=1))
    path = torch.stack(paths, dim=1)[:, :, None]
    weights = (path * p - torch.where(is_followed, q, 0)).clamp_(min=0)
    mass = weights.sum(dim=2, keepdim=True)
    total = mass + (1 - path)
    accept = torch.where(total > 0, mass / total, 1.0)[:, :, 0]  # nothing is left: p equals q, up to rounding
    return accept, torch.where(mass > 0, weights, p)
