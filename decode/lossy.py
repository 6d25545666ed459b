"""LOSSY acceptance: it changes the text. Nothing here is used unless its name is asked for.

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.accept import Accepted
from decode.sampling import Sampling
from decode.tree import Tree

HARD, SOFT = 0.09, 0.3  # Medusa's defaults, epsilon and delta


def check_typical(sampling: Sampling) -> None:
    """Raise ValueError for settings that typical acceptance cannot honour."""
    if sampling.processors:
        raise ValueError("typical acceptance knows no logits processors; leave them out or accept without loss")


def accept_typically(
    tree: Tree, logits: Tensor, sampling: Sampling, rows: Sequence[int], sequences: Sequence[Sequence[int]]
) -> Accepted:
    """Medusa's typical acceptance (Cai et al. 2024, section 2.3.1, equation 1): the longest path of plausible guesses.

    A guess x passes where p(x) > min(HARD, SOFT exp(-entropy of p)), p being the target's law at the run's temperature;
    of equally long paths the likeliest is taken, and the token after it is the likeliest there. Without chance, so
    the answer is no sample of the target's law, at no temperature: it depends on the proposer. At temperature 0 it is
    greedy decoding. The arguments are those of `decode.accept.accept`; the last two play no part.
    """
    tree = tree.to(logits.device)
    law = sampling.probabilities(logits.flatten(0, 1)).view(logits.shape)  # [B, N, V]
    bar = (SOFT * torch.exp(torch.special.entr(law).sum(dim=-1).neg())).clamp(max=HARD)  # [B, N]
    parents = tree.parents.clamp(min=0)
    chance = law.flatten(1).gather(1, parents * logits.shape[2] + tree.tokens)  # [B, N]
    wrong = (chance <= bar.gather(1, parents)) | ~tree.real
    wrong[:, 0], chance[:, 0] = False, 1.0
    reached = ~(tree.ancestors & wrong[:, None]).any(dim=2)
    likely = (tree.ancestors * chance.clamp(min=1e-300).log()[:, None]).sum(dim=2)
    longest = tree.depth == torch.where(reached, tree.depth, -1).amax(dim=1, keepdim=True)
    last = torch.where(reached & longest, likely, -torch.inf).argmax(dim=1)
    row = torch.arange(tree.batch, device=last.device)
    paths = [on.nonzero()[:, 0].tolist() for on in tree.ancestors[row, last]]
    tokens = [nodes[path].tolist() for nodes, path in zip(tree.tokens, paths, strict=True)]
    return Accepted(paths, tokens, law[row, last].argmax(dim=1).tolist(), tree.sizes.tolist())
