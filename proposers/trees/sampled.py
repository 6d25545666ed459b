"""Trees of sampled tokens. Their shape does not depend on the sampled values, so rejection stays unbiased.

Where a head's distribution is close to the target's, its samples are accepted more often than its most likely tokens
(Leviathan et al. 2023; trees sampled without replacement: Jeon et al., "RSD", 2024). The rules of `decode.rejection`
are exact if each token, given all tokens sampled before it, has the probabilities `q` that the tree reports. So whether
a node is kept must not depend on the node's own token. These conditions ensure it:

 1. Every path samples its own next tokens, in order, without replacement.
 2. The score of a path's j-th sample is the path's score times the probability of its j-th most likely token, not of
    the token sampled. So it depends only on the tokens above the node. No node scores above its parent or an earlier
    sibling.
 3. Hence the n best nodes (ties: the earlier candidate first) are those of a tree that grows node by node, best first,
    and samples each token when its node is added: the next node, and the paths that are followed, depend only on
    tokens sampled before. Candidates that are left out count as never sampled.
 4. If n is not given, growth stops at the first node that is not worth it (`draft_budget.grow_while_worth`). That is
    known before the node's token is sampled. Choosing the best size of the finished tree would be biased.
 5. The number of levels is chosen from the first level's scores, which depend on no sampled token.

The rows of a batch may share n: each row gets its i-th node at the same time.

Shapes: B rows, W paths followed, R ranks (samples per path), M candidates, N nodes, D draft vocabulary, V the target's
vocabulary, P paths of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from decode import Sampling, Step
from decode.gpu.fusion import fused
from decode.noise import DRAFT, KEY_NAMES, inverse_cdf, make_exponential, row_keys, stream_uniforms
from decode.sampling import upcast_half, warp

GROUP = 256  # tokens whose probabilities are kept as one sum
LEAST = -80.0  # stands for the log of 0: a calibration would turn -inf into NaN


class SampledTokens:
    """Samples the next tokens of one step's paths, at the run's temperature, top-k, top-p and min-p.

    A row's samples depend on its seed, not on the other rows. sampling: without processors, which need a text.
    seeds [B]: those of `find_seeds`. token_map [D]: the target's tokens of draft ids; None: the same.
    """

    def __init__(self, sampling: Sampling, vocabulary: int, seeds: Tensor, token_map: Tensor | None) -> None:
        self.sampling, self.vocabulary, self.token_map = sampling, vocabulary, token_map
        self._seeds, self._used = seeds, 0
        # Of each level: the candidates [B, W] whose next tokens were sampled (-1: the root), and q [B, W, D].
        self._samples: list[tuple[Tensor, Tensor]] = []

    def pick(self, logits: Tensor, ranks: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Draft ids [B, W, R] sampled after the paths, and for condition 2 the R highest log-probabilities there.

        logits [B, W, D], or [B, 1, D] if all paths have the same. places [B, W]: the candidates at the paths' ends.
        """
        ranks = min(ranks, logits.shape[2])
        if logits.device.type == "cuda":
            begin = self._take(places.shape[1] * logits.shape[2])
            ids, log_q, q = sample_at_once(logits, [*self.sampling.warpers], self._seeds, begin, places, ranks)
            self._samples.append((places, q))
            return ids, log_q
        q, log_q = rank_probabilities(self.sampling.probabilities(logits.flatten(0, 1)), logits, places, ranks)
        self._samples.append((places, q))
        begin = self._take(places.shape[1] * ranks * 2)  # two for each sample
        indices = torch.arange(begin, self._used, device=q.device)
        uniforms = stream_uniforms(self._seeds, indices).view(-1, ranks, 2)  # [P, R, 2]
        ids = sample_without_replacement(q.flatten(0, 1), uniforms)
        return ids.unflatten(0, places.shape), log_q

    def _take(self, count: int) -> int:
        """Reserve so many of each row's random numbers. Returns the index of the first."""
        self._used += count
        return self._used - count

    def lay_out_q(self, chosen: Tensor, candidates: int) -> Tensor:
        """q [B, N, V] of each node's children; zero after nodes whose path was not followed.

        chosen [B, N - 1]: which of so many candidates are the nodes.
        """
        return _lay_out_q(self._samples, chosen, candidates, self.token_map, self.vocabulary)


def find_seeds(step: Step) -> Tensor:
    """A number [B] for each row, from the seed, its request id and its length."""
    if step.upload is not None and KEY_NAMES[DRAFT] in step.upload:
        return step.upload[KEY_NAMES[DRAFT]][:, 0]
    made = row_keys(step.sampling.seed, step.request_ids, [*map(len, step.sequences)], 1, DRAFT)
    return made[:, 0].to(step.target.device)


@fused
def _lay_out_q(
    samples: Sequence[tuple[Tensor, Tensor]],
    chosen: Tensor,
    candidates: int,
    token_map: Tensor | None,
    vocabulary: int,
) -> Tensor:
    """`SampledTokens.lay_out_q`.

    samples: of each level, the paths' last candidates [B, W], and q [B, W, D] after them.
    """
    owners, q = (torch.cat(parts, dim=1) for parts in zip(*samples, strict=True))
    batch, nodes, device = chosen.shape[0], chosen.shape[1] + 1, chosen.device
    place = torch.full((batch, candidates + 1), nodes, device=device)  # candidate -> its node
    place.scatter_(1, chosen, torch.arange(1, nodes, device=device).expand_as(chosen))
    place[:, -1] = 0  # the root, which candidates call -1
    rows = torch.arange(batch, device=device)[:, None, None]
    tokens = torch.arange(q.shape[2], device=device) if token_map is None else token_map
    laid_out = q.new_zeros(batch, nodes + 1, vocabulary)  # the last place: candidates left out
    laid_out[rows, place.gather(1, owners % place.shape[1])[:, :, None], tokens] = q
    return laid_out[:, :nodes]


def rank_probabilities(p: Tensor, logits: Tensor, places: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """q [B, W, D] of all paths, and its highest log-probabilities, from p [B W, D] as computed from the logits.

    q is NaN after logits that are NaN or infinite: no token is accepted there.
    """
    q = p.view(logits.shape)
    log_q = q.topk(ranks, dim=2).values.log().nan_to_num(nan=LEAST).clamp(min=LEAST, max=0).float()
    return q.expand(-1, places.shape[1], -1), log_q


@fused
def sample_at_once(
    logits: Tensor, warpers: Sequence[LogitsProcessor], seeds: Tensor, begin: int, places: Tensor, ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`SampledTokens.pick` in few launches: draft ids and log-probabilities, [B, W, R] each, and q [B, W, D].

    begin: the index of each row's first random number. Tokens after NaN or infinite logits are not accepted.
    """
    q, log_q = rank_probabilities(warp(upcast_half(logits).flatten(0, 1), warpers), logits, places, ranks)
    indices = torch.arange(begin, begin + q[0].numel(), device=q.device)
    noise = make_exponential(seeds, indices).view(q.shape)
    return sample_by_gumbel(q, noise, ranks), log_q, q


def sample_without_replacement(q: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [P, R] sampled in order, without replacement, from each of P distributions.

    q [P, D] and uniforms [P, R, 2] are float64. Each sample is found by its group's sum first, which is faster than a
    running sum over all tokens. A sampled token's group is summed again, because subtraction would leave a rounding
    error. If fewer than R tokens have a probability, the others have q = 0, and no rejection rule accepts them.
    """
    size = q.shape[1]
    groups = q.new_zeros(len(q), -(-size // GROUP), GROUP)  # [P, G, GROUP]
    groups.flatten(1)[:, :size] = q
    sums = groups.sum(dim=2)  # [P, G]
    paths, sampled = torch.arange(len(q), device=q.device), []
    for rank in range(uniforms.shape[1]):
        group = inverse_cdf(sums, uniforms[:, rank, 0]).clamp(max=groups.shape[1] - 1)
        inside = groups[paths, group]  # [P, GROUP]
        token = inverse_cdf(inside, uniforms[:, rank, 1]).clamp(max=GROUP - 1)
        inside[paths, token] = 0
        groups[paths, group], sums[paths, group] = inside, inside.sum(dim=1)
        sampled.append((group * GROUP + token).clamp(max=size - 1))
    return torch.stack(sampled, dim=1)


def sample_by_gumbel(q: Tensor, exponential: Tensor, ranks: int) -> Tensor:
    """Tokens [B, W, R] sampled in order, without replacement, from q [B, W, D] (Gumbel top-k; Kool et al. 2019).

    exponential [B, W, D]: independent noise. It is more work than `sample_without_replacement`, but few launches.
    """
    return (q / exponential).topk(ranks, dim=2).indices
