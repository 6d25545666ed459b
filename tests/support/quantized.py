"""Stand-ins for layers of quantization packages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Quantized(Tensor):
    """A weight as torchao keeps it: it knows the layer's product, and hardly anything else.

    scale: of its integers. act_quant_kwargs: if any, inputs are rounded to 8 bits, each token by its own scale.
    """

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor | None = None, act_quant_kwargs: Any = None) -> Quantized:
        made = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, requires_grad=False)
        made.values, made.act_quant_kwargs = values, act_quant_kwargs
        if scale is not None:
            made.scale = scale
        return made

    def dequantize(self) -> Tensor:
        return self.values

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            inputs, weight = args[:2]
            if weight.act_quant_kwargs is not None:
                scale = inputs.abs().amax(dim=-1, keepdim=True) / 127
                inputs = (inputs / scale).round() * scale
            return func(inputs, weight.values, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, getattr(args[0], "scale", None), args[0].act_quant_kwargs)
        raise NotImplementedError(f"{func} of a quantized weight")


def round_to(bits: int, values: Tensor, group: int, zero: float | None = None) -> tuple[Tensor, Tensor]:
    """Values [N, K] as integers times a scale for each group of inputs, and the scales [N, K / group].

    zero: what all integers count from, as a share of their range; None: from 0, and both signs are there.
    """
    grouped, half = values.view(len(values), -1, group), 1 << bits - 1
    scale = grouped.abs().amax(-1, keepdim=True) / half
    numbers = (grouped / scale).round().clamp(-half, half - 1)
    offset = 0.0 if zero is None else zero * 2 * half
    return ((numbers - offset) * scale).view_as(values), scale[..., 0]


class HiddenLayer(nn.Module):
    """A layer as gptqmodel makes it: no `nn.Linear`, without a weight to read. Computes with values [N, K].

    rounds_inputs: to 8 bits, each token by its own scale. dtype: of what it returns; None is its inputs'.
    """

    def __init__(
        self, values: Tensor, bias: Tensor | None = None, rounds_inputs: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self._dtype = dtype
        self.out_features, self.in_features = values.shape
        self.qweight, self.bias = nn.Buffer(torch.zeros(4, 4, dtype=torch.int32)), bias
        self._values, self._rounds_inputs = values, rounds_inputs

    def forward(self, inputs: Tensor) -> Tensor:
        if self._rounds_inputs:
            scale = inputs.abs().amax(dim=-1, keepdim=True) / 127
            inputs = (inputs / scale).round() * scale
        outputs = inputs @ self._values.to(inputs.dtype).T
        return (outputs if self.bias is None else outputs + self.bias).to(self._dtype or inputs.dtype)
