"""What moves the weights: Muon the matrices between hidden states, AdamW vocabularies, norms, biases and adapters.

Muon makes a matrix's step equally long in all directions (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982), and
so learns more from each text where there are few of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

VOCABULARIES = {"lm_head", "lm_heads", "embed_tokens"}
WEIGHT_DECAY = 0.01
# With "match_rms_adamw" a weight's step is 0.2 times the rate in the mean; here it is the rate itself, as of a young
# AdamW's.
STRIDE = 5.0


def make_optimizers(weights: Mapping[str, Tensor], lr: float, shares: Mapping[str, float]) -> list[Optimizer]:
    """The optimizers of an objective's weights, by their names.

    shares: the shares of the learning rate that some parts are given, by the beginning of their names. Muon leaves
    these parts alone: the adapters of a matrix are no whole matrices.
    """
    hidden: list[Tensor] = []
    groups: dict[float, list[Tensor]] = {}
    for name, weight in weights.items():
        part = name.split(".")[0]
        if part not in shares and is_hidden(name, weight):
            hidden.append(weight)
        else:
            groups.setdefault(shares.get(part, 1.0), []).append(weight)
    optimizers: list[Optimizer] = []
    if hidden:
        fast = [_group(hidden, STRIDE * lr)]
        optimizers.append(Muon(fast, weight_decay=WEIGHT_DECAY / STRIDE, adjust_lr_fn="match_rms_adamw"))
    if groups:
        rest = [_group(members, share * lr) for share, members in groups.items()]
        optimizers.append(AdamW(rest, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY))
    return optimizers


def is_hidden(name: str, weight: Tensor) -> bool:
    """Whether a weight of this name is a matrix from hidden states to hidden states."""
    return weight.ndim == 2 and VOCABULARIES.isdisjoint(name.split("."))


def _group(weights: list[Tensor], lr: float) -> dict[str, Any]:
    return {"params": weights, "lr": lr, "initial_lr": lr}
