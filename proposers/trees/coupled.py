"""Coupled drafts: where the target samples, drafts know the noise that it will sample with.

The target draws a token by the Gumbel-max trick: the largest of log p + G, where the noise G is keyed by seed, request,
position and token. A draft that adds the same noise to its own log-probabilities finds the same token wherever its
probabilities are close to the target's (Daliri, Musco, Suresh, "Coupling without Communication", 2024, for chains). The
draft is deterministic given the noise. So it is verified as any other, and the text is that of plain decoding.

Shapes: B rows, W paths, L levels, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode import Sampling, Step
from decode.trees.accept import find_keys
from decode.trees.noise import TEXT, make_exponential
from decode.trees.sampling import for_groups, upcast_half


@dataclass(frozen=True)
class Coupling:
    """The target's noise at the positions of a draft.

    samplings: of each row. keys [B, >= L]: of each level, see `noise.row_keys`. tokens [D]: the target's tokens
    of a draft model's own, whose text begins with them; None: as `token_map` says.
    """

    samplings: Sequence[Sampling]
    keys: Tensor
    tokens: Tensor | None = None

    def perturb(self, logits: Tensor, level: int, token_map: Tensor | None) -> Tensor:
        """Logits [B, W, D] float32 whose order is that of the draft's choices, and whose softmax is their probability.

        They are the logits plus the noise times the temperature: as the temperature falls, the noise counts less.
        token_map [D]: the target's tokens of draft ids.
        """
        keys, logits = self.keys[:, level], logits.expand(len(self.keys), -1, -1)
        known = token_map if self.tokens is None else self.tokens
        tokens = torch.arange(logits.shape[2], device=logits.device) if known is None else known

        def perturb(sampling: Sampling, rows: Any) -> Tensor:
            scores = upcast_half(logits[rows])
            if sampling.greedy:
                return scores
            noise = make_exponential(keys[rows], tokens).log_().neg_().float()  # [B, D] Gumbel noise
            warped = scores.flatten(0, 1)
            for warper in sampling.warpers:
                warped = warper(None, warped)
            return sampling.temperature * (warped.view(scores.shape) + noise[:, None])

        return for_groups(self.samplings, perturb)


def find_noise(step: Step, levels: int, stream: int = TEXT) -> Tensor:
    """The keys [B, >= levels] of the tokens after each row's root, or of another stream's decisions there."""
    texts = dict(zip(step.request_ids, step.sequences, strict=True))
    return find_keys(stream, levels, step.samplings[0], texts, step.target.device, step.upload)


def find_coupling(samplings: Sequence[Sampling], keys: Tensor | None) -> Coupling | None:
    """The coupling to the keys of `find_noise`; None if the target samples no row."""
    return None if keys is None else Coupling(samplings, keys)
