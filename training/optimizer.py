"""Optimizers: Muon for matrices between hidden states; AdamW for vocabularies, norms, biases and adapters.

Muon makes a matrix's step equally long in all directions (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982). It
learns more from the same number of texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

VOCABULARIES = {"lm_head", "lm_heads", "embed_tokens"}
WEIGHT_DECAY = 0.01
# With "match_rms_adamw" a weight moves by 0.2 times the learning rate on average. This makes it the learning rate
# itself, as with AdamW in its first steps.
MUON_SCALE = 5.0


def make_optimizers(weights: Mapping[str, Tensor], lr: float, lr_shares: Mapping[str, float]) -> list[Optimizer]:
    """The optimizers for an objective's weights by name; an optimizer without weights is left out.

    lr_shares: for some parts, by the beginning of their names, a factor of the learning rate. They get AdamW: half of
    a low-rank adapter is no whole matrix.
    """
    hidden: list[Tensor] = []
    groups: dict[float, list[Tensor]] = {}
    for name, weight in weights.items():
        part = name.split(".")[0]
        if part not in lr_shares and is_hidden(name, weight):
            hidden.append(weight)
        else:
            groups.setdefault(lr_shares.get(part, 1.0), []).append(weight)
    optimizers: list[Optimizer] = []
    if hidden:
        group = [_make_group(hidden, MUON_SCALE * lr)]
        optimizers.append(Muon(group, weight_decay=WEIGHT_DECAY / MUON_SCALE, adjust_lr_fn="match_rms_adamw"))
    if groups:
        rest = [_make_group(members, share * lr) for share, members in groups.items()]
        optimizers.append(AdamW(rest, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY))
    return optimizers


def is_hidden(name: str, weight: Tensor) -> bool:
    """Whether the weight with this name is a matrix from hidden states to hidden states."""
    return weight.ndim == 2 and VOCABULARIES.isdisjoint(name.split("."))


def _make_group(weights: list[Tensor], lr: float) -> dict[str, Any]:
    return {"params": weights, "lr": lr, "initial_lr": lr}
