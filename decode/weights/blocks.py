"""Weights as files store them, one by one or in blocks of a few bits, and layers that hold them like that."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

# The numbers that ggml gives to the forms of weights: one by one, and in blocks. A block has a multiple of 32 inputs.
PLAIN = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
BLOCKS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
# Blocks with a float32 scale for 32 inputs, by bits and whether there is a minimum too. ggml has none.
FLOAT_BLOCKS = {(4, False): 100, (4, True): 101, (8, False): 102, (8, True): 103}


class Weight(NamedTuple):
    """A weight as a checkpoint stores it.

    data: bytes [N, bytes of a row]. form: one of `PLAIN`, `BLOCKS` or `FLOAT_BLOCKS`. inputs: K. order [N]: row i of
    the weight is row `order[i]` of the data; None: they are in order.
    """

    data: Tensor
    form: int
    inputs: int
    order: Tensor | None = None

    @classmethod
    def dense(cls, weight: Tensor) -> Weight:
        """A weight [N, K] in one of the dtypes of `PLAIN`."""
        return cls(weight.contiguous().view(torch.uint8), PLAIN[weight.dtype], weight.shape[1])

    def rows(self, numbers: Tensor | None = None) -> Tensor:
        """Some rows, or all, in float32: [n, K] for row numbers [n]. Forms of ggml's only."""
        from gguf import GGMLQuantizationType, dequantize

        order = numbers if self.order is None else self.order if numbers is None else self.order[numbers]
        chosen = self.data if order is None else self.data[order]
        values = torch.from_numpy(dequantize(chosen.numpy(), GGMLQuantizationType(self.form))).float()
        values = values.view(-1, self.inputs)
        return values.clone() if order is None else values  # a file's own memory is not given away


class WeightStack(NamedTuple):
    """The matrices of a layer's experts as a checkpoint stores them: of each, the rows of one weight after the other.

    weights: each [E n, bytes of a row], n rows of each of E experts.
    """

    weights: tuple[Weight, ...]
    experts: int

    def split(self) -> list[Weight]:
        """The weights of the first expert, then those of the others."""
        parts = [[each._replace(data=data) for data in each.data.chunk(self.experts)] for each in self.weights]
        return [weight for expert in zip(*parts, strict=True) for weight in expert]

    def dense(self) -> Tensor:
        """All matrices [E, N, K] in float32."""
        return torch.cat([each.rows().view(self.experts, -1, each.inputs) for each in self.weights], dim=1)

    def rows(self, numbers: Tensor) -> Tensor:
        """Some rows in float32: [n, K] for row numbers [n] among those of all experts."""
        size = len(self.weights[0].data) // self.experts
        expert, row = numbers // (size * len(self.weights)), numbers % (size * len(self.weights))
        found = torch.stack([each.rows(expert * size + row % size) for each in self.weights])
        return found[row // size, torch.arange(len(numbers))]


class StoredExperts(nn.Module):
    """The experts of a layer, as `StoredLayer`. stored: by the names of the module's parameters [E, N, K]."""

    module: Any

    def __init__(self, stored: dict[str, WeightStack], module: nn.Module) -> None:
        super().__init__()
        vars(self)["module"] = module
        self.stored = stored
        for name in stored:
            self.register_parameter(name, module._parameters[name])


class StoredLayer(nn.Module):
    """A linear layer or an embedding, with its weight as a file stores it. It is only there to be packed or unpacked.

    module: the layer itself, whose weight has no values.
    """

    module: Any
    weight: nn.Parameter  # without values: the shape and dtype
    bias: nn.Parameter | None

    def __init__(self, stored: Weight, module: nn.Module) -> None:
        super().__init__()
        vars(self)["module"] = module  # no part of this one: its parameters would count twice
        self.stored, self.in_features, self.out_features = stored, stored.inputs, len(stored.data)
        self.weight, self.bias = cast(nn.Parameter, module.weight), getattr(module, "bias", None)
