"""Linear layers on a CPU whose weights lie in oneDNN's own layout.

A decoding step on a CPU reads every weight once, and `F.linear` on few rows reads them at a third of the memory's
speed. oneDNN reads weights that were packed beforehand in half the time or less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

# Layers that most models feed with the same tensor: one pass over their weights side by side saves calls.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ROWS_HINT = 16  # a layout for 16 rows serves 1 to 64 of them; one for a single row is slower even there
FEW, PADDED = 3, 5  # below FEW, PADDED rows or more are computed: one takes a tenth longer than five, two a third


def can_pack(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether oneDNN has a packed kernel for this layer here."""
    if type(module) is not nn.Linear or module.weight.device.type != "cpu" or hasattr(module, "_hf_hook"):
        return False
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    dtype = module.weight.dtype
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinear(nn.Module):
    """`nn.Linear` on a weight that lies in oneDNN's own layout. For inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return multiply(inputs, self.packed, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


Make = Callable[[nn.Linear], nn.Module]  # what takes a linear layer's place


def pack_layers(module: nn.Module, make: Make = PackedLinear) -> None:
    """Pack all linear layers within a module, in place.

    Layers that cannot be packed (on another device, in float64, quantised, offloaded) are left alone.
    """
    for parent in list(module.modules()):
        for names in SIBLINGS:
            siblings: list[Any] = [getattr(parent, name, None) for name in names]
            if all(map(can_pack, siblings)) and len({sibling.in_features for sibling in siblings}) == 1:
                family = PackedFamily(siblings, make)
                for index, name in enumerate(names):
                    setattr(parent, name, PackedMember(family, index))
        for name, child in list(parent.named_children()):
            if can_pack(child):
                setattr(parent, name, make(child))


class PackedFamily:
    """Several linear layers packed as one. The first to be called with an input computes the outputs of all."""

    def __init__(self, linears: Sequence[nn.Linear], make: Make = PackedLinear) -> None:
        self.joined = make(join(linears))
        self.sizes = [linear.out_features for linear in linears]
        self._last: tuple[Tensor | None, tuple[Tensor, ...]] = None, ()  # an input, and the outputs of all for it

    def output(self, inputs: Tensor, index: int) -> Tensor:
        """What member `index` makes of the inputs."""
        known, outputs = self._last  # in one piece: another thread may be at work with the same model
        if inputs is not known:
            outputs = self.joined(inputs).split(self.sizes, dim=-1)
        last = index == len(self.sizes) - 1  # it asks last: hold nothing longer than needed
        self._last = (None, ()) if last else (inputs, outputs)
        return outputs[index]


class PackedMember(nn.Module):
    """One layer of a packed family, in the place of the `nn.Linear` that it was."""

    def __init__(self, family: PackedFamily, index: int) -> None:
        super().__init__()
        self.family, self.index = family, index
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.family.output(inputs, self.index)


PACKED = PackedLinear, PackedMember


def join(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Layers with the same inputs as one, their outputs side by side."""
    weight = torch.cat([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return make_linear(weight, None)
    zeros = [linear.weight.new_zeros(linear.out_features) for linear in linears]
    biases: list[Tensor] = [
        zero if linear.bias is None else linear.bias for zero, linear in zip(zeros, linears, strict=True)
    ]
    return make_linear(weight, torch.cat(biases))


def make_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer on these tensors, which does not learn."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def multiply(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with a packed weight."""
    rows = inputs.numel() // inputs.shape[-1]
    if inputs.dim() == 1 or not 0 < rows < FEW:
        return torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    repeated = torch.cat([inputs] * -(-PADDED // rows))  # of all ways to more rows the one with the cheapest calls
    return torch.ops.mkldnn._linear_pointwise(repeated, packed, bias, "none", [], "")[: inputs.shape[0]]
