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

    lr_shares: factors of the learning rate for some parts, by the beginning of their names. They get AdamW: half of a
    low-rank adapter is no whole matrix.
    """
    muon, adamw = dict[float, dict[str, Any]](), dict[float, dict[str, Any]]()  # by factor of the learning rate
    for name, weight in weights.items():
        part = name.split(".")[0]
        hidden = part not in lr_shares and is_hidden(name, weight)
        groups, scale = (muon, MUON_SCALE) if hidden else (adamw, lr_shares.get(part, 1.0))
        new = {"params": [], "lr": scale * lr, "initial_lr": scale * lr}
        groups.setdefault(scale, new)["params"].append(weight)
    optimizers: list[Optimizer] = []
    if muon:
        optimizers.append(Muon(muon.values(), weight_decay=WEIGHT_DECAY / MUON_SCALE, adjust_lr_fn="match_rms_adamw"))
    if adamw:
        optimizers.append(AdamW(adamw.values(), betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY))
    return optimizers


def is_hidden(name: str, weight: Tensor) -> bool:
    """Whether the weight with this name is a matrix from hidden states to hidden states."""
    return weight.ndim == 2 and VOCABULARIES.isdisjoint(name.split("."))
