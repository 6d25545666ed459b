"""Medusa-2: a head and LoRA adapters of its target are trained together, so that the target becomes easier to draft
for (Cai et al., "Medusa", 2024, section 2.2.2).

Self-distillation (section 2.3.2) keeps the adapted target close to the original. Start from a trained head: a new one
would only disturb the target. LoRA (Hu et al. 2021) is done with hooks and not with peft, which renames the model's
modules: here the model stays a stock model, and with the hooks inactive exactly the original.

Shapes: A answer positions of all texts, S labels, V vocabulary; R rank, I inputs and O outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode import Target
from decode.models.stock_model import find_decoder
from decode.models.user_cache import scratch
from training.objectives import Loss, MedusaObjective
from training.teacher import Batch, Teacher, run_target

HEADS_WEIGHT = 0.2  # of the head's loss, as in the authors' recipe for Vicuna
ADAPTERS_LR_SHARE = 1 / 4  # of the head's learning rate, in all of the authors' recipes
MIN_REST = 1e-6  # float32 cannot tell a smaller rest of a distribution from zero


class LowRankUpdate(nn.Module):
    """The trained update of one linear layer: scale * up(down(inputs)); zero at first, since `up` is zero."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        dtype = torch.promote_types(linear.weight.dtype, torch.float32)  # half precision would lose small steps
        self.down = nn.Parameter(linear.weight.new_empty(rank, linear.in_features, dtype=dtype))  # [R, I]
        self.up = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank, dtype=dtype))  # [O, R]
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., I] -> [..., O], in the precision of the layer."""
        narrow = nn.functional.linear(inputs, self.down.to(inputs.dtype))
        return self.scale * nn.functional.linear(narrow, self.up.to(narrow.dtype))

    def merge(self, weight: Tensor) -> Tensor:
        """The layer's weight [O, I] plus the update."""
        return (weight + self.scale * (self.up @ self.down)).to(weight.dtype)


class Adapters(nn.Module):
    """Low-rank updates for all linear layers of a model's decoder, whose own weights are frozen.

    The output layer has none: heads may share it. Default rank and alpha are those of Medusa-2's authors. Raises
    ValueError if the model has no plain linear layer.
    """

    def __init__(self, model: PreTrainedModel, rank: int = 32, alpha: float = 16.0) -> None:
        super().__init__()
        self.active = True
        inside = set(find_decoder(model)[0].modules())
        linears = {name: part for name, part in model.named_modules() if type(part) is nn.Linear and part in inside}
        if not linears:
            raise ValueError(
                f"{type(model).__name__} has no linear layers to adapt; packed or quantized ones do not count"
            )
        model.requires_grad_(False)
        self.by_name = {name: LowRankUpdate(linear, rank, alpha) for name, linear in linears.items()}
        self.updates = nn.ModuleList(self.by_name.values())
        for name, linear in linears.items():
            linear.register_forward_hook(partial(self._add, self.by_name[name]))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside this context the model is the original."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    @torch.no_grad()
    def merge(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model's state dict with the updates added to its weights; `states` is not changed."""
        updates = {f"{name}.weight": update for name, update in self.by_name.items()}
        return {name: updates[name].merge(state) if name in updates else state for name, state in states.items()}

    def _add(self, update: LowRankUpdate, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + update(args[0]) if self.active else output


class Medusa2Objective(nn.Module):
    """KL(original || adapted target) on answers, plus `HEADS_WEIGHT` times the head's loss on the adapted features.

    A batch's labels are the original target's (`teacher`); its features are not used. The target is not part of this
    module: it stays in evaluation mode, and only head and adapters are trained.
    """

    lr_shares: ClassVar[dict[str, float]] = {"adapters": ADAPTERS_LR_SHARE}

    def __init__(self, target: Target, adapters: Adapters, heads: MedusaObjective) -> None:
        super().__init__()
        self.target, self.adapters, self.heads = target, adapters, heads
        self.teacher = Teacher(target, heads.head.features, adapters.off)

    def forward(self, batch: Batch) -> Loss:
        answers = batch.answers
        features, logits = run_target(self.target, self.heads.head.features, batch.tokens, answers)
        loss = self.heads(batch._replace(features=features))
        drift = divergence(logits, batch.labels[answers], batch.probabilities[answers])
        return replace(loss, total=drift + HEADS_WEIGHT * loss.total)


def divergence(logits: Tensor, labels: Tensor, probabilities: Tensor) -> Tensor:
    """The sum over rows of KL(p || softmax(logits)), a lower bound, for a p whose most likely tokens are known.

    logits [A, V]; labels and probabilities [A, S]. All other tokens are treated as one, so value and gradient are zero
    if both distributions agree. Cross-entropy with the labels alone would push all others to zero.
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_q = exact.gather(1, labels) - exact.logsumexp(dim=1, keepdim=True)  # [A, S]
    p = probabilities.to(exact.dtype)
    rest_p, rest_q = ((1 - known.sum(dim=1)).clamp_min(MIN_REST) for known in (p, log_q.exp()))  # [A]
    return (torch.xlogy(p, p) - p * log_q).sum() + (rest_p * (rest_p.log() - rest_q.log())).sum()


def save_adapted(target: Target, adapters: Adapters, folder: Path) -> None:
    """Write the adapted target and its tokenizer as an ordinary Hugging Face folder, replacing an older one.

    It is written under another name first: a kill leaves a complete model or, between two renames, none.
    """
    new, old = (folder.with_name(f".{folder.name}.{what}") for what in ("new", "old"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch(new), scratch(old):
        target.model.save_pretrained(new, state_dict=adapters.merge(target.model.state_dict()))
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(new)
        if folder.exists():
            folder.rename(old / folder.name)
        new.rename(folder)
