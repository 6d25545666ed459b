"""Optimizers: Muon for matrices between hidden states; AdamW for vocabularies, norms and biases.

Muon makes a matrix's step equally long in all directions (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982). It
learns more from the same number of texts.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

VOCABULARIES = {"lm_head", "lm_heads", "embed_tokens"}
WEIGHT_DECAY = 0.01
# With "match_rms_adamw" a weight moves by 0.2 times the learning rate on average. This makes it the learning rate
# itself, as with AdamW in its first steps.
MUON_SCALE = 5.0


def make_optimizers(weights: Mapping[str, Tensor], lr: float) -> list[Optimizer]:
    """The optimizers for an objective's weights by name; an optimizer without weights is left out."""
    hidden = [weight for name, weight in weights.items() if is_hidden(name, weight)]
    others = [weight for name, weight in weights.items() if not is_hidden(name, weight)]
    optimizers: list[Optimizer] = []
    if hidden:
        groups = [{"params": hidden, "initial_lr": MUON_SCALE * lr}]
        decay = WEIGHT_DECAY / MUON_SCALE
        optimizers.append(Muon(groups, lr=MUON_SCALE * lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    if others:
        groups = [{"params": others, "initial_lr": lr}]
        optimizers.append(AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY))
    return optimizers


def is_hidden(name: str, weight: Tensor) -> bool:
    """Whether the weight with this name is a matrix from hidden states to hidden states."""
    return weight.ndim == 2 and VOCABULARIES.isdisjoint(name.split("."))
