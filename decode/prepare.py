"""Make a model fast on a CPU without changing what it computes: weights packed once, grouped queries not repeated.

A decoding step on a CPU reads every weight once, and `F.linear` on few rows reads them at a third of the memory's
speed. oneDNN reads weights that were packed beforehand at nearly all of it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from platform import machine
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "draftless_grouped_sdpa"
# Layers that most models feed with the same tensor: one pass over their weights side by side saves calls.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ROWS_HINT = 16  # a layout for 16 rows serves 1 to 64 of them; one for a single row is slower even there
FEW, PADDED = 3, 5  # below FEW, PADDED rows or more are computed: one takes a tenth longer than five, two a third


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Pack the linear layers of a CPU model in place and free their dense weights; embeddings stay as they are."""
    pack_layers(model)
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)
    return model


def pack_layers(module: nn.Module) -> None:
    """Pack all linear layers within a module, in place.

    Layers that cannot be packed (on another device, in float64, quantised, offloaded) are left alone.
    """
    for parent in list(module.modules()):
        for names in SIBLINGS:
            siblings: list[Any] = [getattr(parent, name, None) for name in names]
            if all(map(can_pack, siblings)) and len({sibling.in_features for sibling in siblings}) == 1:
                family = PackedFamily(siblings)
                for index, name in enumerate(names):
                    setattr(parent, name, PackedMember(family, index))
        for name, child in list(parent.named_children()):
            if can_pack(child):
                setattr(parent, name, PackedLinear(child))


def prepared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same for a model that must stay as it is: its modules are copied, its tensors are shared.

    A model that is prepared already is returned itself, and so is one that accelerate has spread over devices: its
    hooks belong to the modules they are on.
    """
    if any(hasattr(module, "_hf_hook") or isinstance(module, PACKED) for module in model.modules()):
        return model
    tensors = [*model.parameters(), *model.buffers()]
    return prepare(copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}))


def can_pack(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether oneDNN has a packed kernel for this layer here."""
    if type(module) is not nn.Linear or module.weight.device.type != "cpu" or hasattr(module, "_hf_hook"):
        return False
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    dtype = module.weight.dtype
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """Whether it has instructions for it. On older CPUs with AVX-512, oneDNN has kernels that only emulate them."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and (native or machine() not in ("x86_64", "AMD64"))


class PackedLinear(nn.Module):
    """`nn.Linear` on a weight that lies in oneDNN's own layout. For inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed, self.bias = pack([linear])
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return multiply(inputs, self.packed, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class PackedFamily:
    """Several linear layers packed as one. The first to be called with an input computes the outputs of all."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.packed, self.bias = pack(linears)
        self.sizes = [linear.out_features for linear in linears]
        self._last: tuple[Tensor | None, tuple[Tensor, ...]] = None, ()  # an input, and the outputs of all for it

    def output(self, inputs: Tensor, index: int) -> Tensor:
        """What member `index` makes of the inputs."""
        known, outputs = self._last  # in one piece: another thread may be at work with the same model
        if inputs is not known:
            outputs = multiply(inputs, self.packed, self.bias).split(self.sizes, dim=-1)
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


def pack(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights of layers with the same inputs, below one another in oneDNN's layout, and their biases."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        bias = None
    else:
        bias = torch.cat(
            [
                weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
                for linear in linears
            ]
        )
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT), bias


def multiply(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with a packed weight."""
    rows = inputs.numel() // inputs.shape[-1]
    if inputs.dim() == 1 or not 0 < rows < FEW:
        return torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    repeated = torch.cat([inputs] * -(-PADDED // rows))  # of all ways to more rows the one with the cheapest calls
    return torch.ops.mkldnn._linear_pointwise(repeated, packed, bias, "none", [], "")[: inputs.shape[0]]


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, but the key-value heads are shared by their queries and not repeated in memory.

    The queries of a head are laid below one another, as if they were more nodes: torch's own kernel for grouped
    queries takes 5 times as long in bfloat16.
    """
    if attention_mask is None or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    batch, heads, nodes, size = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], groups * nodes, size)
    mask = attention_mask if nodes == 1 else attention_mask.repeat(1, 1, groups, 1)  # [B, 1, G * N, S]
    mixed = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=kwargs.get("scaling"))
    return mixed.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, grouped_sdpa)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
