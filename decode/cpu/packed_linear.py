"""Linear layers with weights in oneDNN's packed layout.

A decoding step on a CPU reads every weight once. `F.linear` on a few rows reads them at a third of the memory's
bandwidth. oneDNN reads packed weights in half that time or less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

# Layers that most models call with the same tensor. As one larger layer they need fewer calls.
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
LAYOUT_ROWS = 16  # a layout for 16 rows is fast for 1 to 64; one for a single row is slower even with one row
MIN_ROWS, PADDED_ROWS = 3, 5  # with fewer rows inputs are padded: one takes 10 % longer than five, two 33 %


def can_pack(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether oneDNN can pack this layer on this machine."""
    if type(module) is not nn.Linear or module.weight.device.type != "cpu" or hasattr(module, "_hf_hook"):
        return False
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    dtype = module.weight.dtype
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed weight. For inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), LAYOUT_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        rows, padded = inputs.numel() // inputs.shape[-1], inputs
        if inputs.dim() > 1 and 0 < rows < MIN_ROWS:
            padded = torch.cat([inputs] * -(-PADDED_ROWS // rows))  # the fastest way to add rows
        outputs = torch.ops.mkldnn._linear_pointwise(padded, self.packed, self.bias, "none", [], "")
        return outputs if padded is inputs else outputs[: inputs.shape[0]]


MakeLayer = Callable[[nn.Linear], nn.Module]  # makes the layer that replaces a linear one


def pack_layers(module: nn.Module, make: MakeLayer = PackedLinear) -> None:
    """Pack all linear layers of a module, in place.

    Layers that cannot be packed (on another device, in float64, quantized, offloaded) stay as they are.
    """
    for parent in list(module.modules()):
        for names in MERGED:
            linears: list[Any] = [getattr(parent, name, None) for name in names]
            if all(map(can_pack, linears)) and len({linear.in_features for linear in linears}) == 1:
                merged = MergedLinear(linears, make)
                for index, name in enumerate(names):
                    setattr(parent, name, MergedPart(merged, index))
        for name, child in list(parent.named_children()):
            if can_pack(child) and not isinstance(parent, nn.ModuleDict):  # peft's adapters: it reads their weights
                setattr(parent, name, make(child))


class MergedLinear:
    """Several linear layers as one. The first part called with an input computes the outputs of all parts."""

    def __init__(self, linears: Sequence[nn.Linear], make: MakeLayer = PackedLinear) -> None:
        self.layer = make(_merge(linears))
        self.sizes = [linear.out_features for linear in linears]
        self._last: tuple[Tensor | None, tuple[Tensor, ...]] = None, ()  # an input and its outputs

    def compute(self, inputs: Tensor, index: int) -> Tensor:
        """The output of part `index`."""
        last_inputs, outputs = self._last  # read once: another thread may run the same model
        if inputs is not last_inputs:
            outputs = self.layer(inputs).split(self.sizes, dim=-1)
        is_last = index == len(self.sizes) - 1  # parts are called in order: free the outputs after the last one
        self._last = (None, ()) if is_last else (inputs, outputs)
        return outputs[index]


class MergedPart(nn.Module):
    """One part of a merged layer, in the place of its `nn.Linear`."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self.merged, self.index = merged, index
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.merged.compute(inputs, self.index)


PACKED = PackedLinear, MergedPart


def _merge(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer with the outputs of all, concatenated."""
    weight = torch.cat([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return make_linear(weight, None)
    zeros = [linear.weight.new_zeros(linear.out_features) for linear in linears]
    pairs = zip(linears, zeros, strict=True)
    return make_linear(weight, torch.cat([zero if linear.bias is None else linear.bias for linear, zero in pairs]))


def make_linear(weight: Tensor, bias: Tensor | None, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    """A frozen linear layer that shares these tensors."""
    linear = kind(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear.eval()
