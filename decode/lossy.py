"""LOSSY acceptance: it changes the text. Used only with `lossy_typical_acceptance=True`.

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.accept import Accepted, Texts, read_accepted
from decode.gpu.transfer import Upload
from decode.sampling import NO_TOKEN, Sampling
from decode.tree import Tree

EPSILON, DELTA = 0.09, 0.3  # Medusa's defaults


def accept_typically(
    tree: Tree, logits: Tensor, sampling: Sampling, texts: Texts, upload: Upload | None = None
) -> Accepted:
    """Medusa's typical acceptance (Cai et al. 2024, section 2.3.1, equation 1): the longest path of plausible tokens.

    A draft token x passes if p(x) > min(EPSILON, DELTA exp(-entropy of p)), p being the target's probabilities after
    its parent. Among equally long paths the most probable one wins; the bonus token is the most probable one. Nothing
    is random, so the text is not a sample from the target and depends on the proposer. At temperature 0 this is greedy
    decoding. Arguments as in `decode.accept.accept`; the last two are ignored.
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
