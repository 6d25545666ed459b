"""LoRA: low-rank updates beside the linear layers of a frozen model (Hu et al. 2021).

Our own rather than peft's, for it is little and buys much: no second package whose releases follow transformers', and
updates that hang on as hooks, so that the model keeps its modules and their names. Features are read from it, and it
is decoded with and written, like any stock model. Switched off, the updates leave exactly the untouched model.

Shapes: R rank, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.models.features import find_decoder


class Update(nn.Module):
    """What one linear layer learns: scale * up(down(inputs)), nothing at first, since `up` is zero."""

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
        """The layer's weight [O, I] with the update in it."""
        return (weight + self.scale * (self.up @ self.down)).to(weight.dtype)


class Adapters(nn.Module):
    """Updates for all linear layers of a model's decoder, of which only they have gradients from now on.

    The output layer has none: it is often tied to the embeddings, and heads may share it. rank and alpha are those of
    Medusa-2's authors. Raises ValueError where there is no plain linear layer.
    """

    def __init__(self, model: PreTrainedModel, rank: int = 32, alpha: float = 16.0) -> None:
        super().__init__()
        self.active = True
        decoder = set(find_decoder(model)[0].modules())
        linears = {
            name: module for name, module in model.named_modules() if type(module) is nn.Linear and module in decoder
        }
        if not linears:
            raise ValueError(
                f"{type(model).__name__} has no linear layers to adapt that are neither packed nor quantised"
            )
        model.requires_grad_(False)
        self.by_name = {name: Update(linear, rank, alpha) for name, linear in linears.items()}
        self.updates = nn.ModuleList(self.by_name.values())
        for name, linear in linears.items():
            linear.register_forward_hook(self._adding(self.by_name[name]))

    @contextmanager
    def off(self) -> Iterator[None]:
        """The untouched model, for a while."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    @torch.no_grad()
    def merge(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model's state dict with the updates in its weights; the given one stays as it is."""
        merged = dict(states)
        for name, update in self.by_name.items():
            merged[f"{name}.weight"] = update.merge(states[f"{name}.weight"])
        return merged

    def _adding(self, update: Update) -> Any:
        def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output + update(args[0]) if self.active else output

        return add
