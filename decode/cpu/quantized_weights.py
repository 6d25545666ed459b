"""Quantized linear layers of transformers checkpoints, in forms that the CPU's linear op takes; and rounded ones.

A layer is not known by its package or class. Its values and scales are read, and the integers follow from both. Blocks
of 4 or 8 bits store them. GPTQ and AWQ layers round each weight to 16 bits before they use it, and are stored so. A
layer is packed if the op then computes what the layer computes. A layer that also quantizes its inputs runs as it is.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.cpu.packed_linear import PackedLinear, agree, can_pack
from decode.devices.transfer import waits
from decode.weights.blocks import FLOAT_BLOCKS, StoredLayer, Weight
from decode.weights.layers import make_stored

GROUP = 32  # inputs of a block
UNITS = 1024  # unit vectors that a layer takes at once
ROUNDING = 2.0**-22  # of a value, as a share of the largest in its block


@torch.no_grad()
def store_quantized_layers(model: PreTrainedModel) -> None:
    """Make quantized linear layers stored ones, in place, where that holds exactly the values that they compute with.

    A block is one of 32 inputs with a float32 scale: 5 or 9 bits for an input, and one more with a minimum. Larger
    groups repeat their scale. Other layers stay, among them those in bfloat16, for blocks take float32 inputs.
    """
    for parent in list(model.modules()) if model.dtype == torch.float32 else []:
        for name, layer in list(parent.named_children()):
            is_linear = isinstance(layer, nn.Linear) or isinstance(getattr(layer, "qweight", None), Tensor)
            if is_linear and not isinstance(parent, nn.ModuleDict):  # peft's adapters
                stored = find_stored(layer)
                if stored is not None:
                    setattr(parent, name, stored)


def find_stored(layer: Any) -> StoredLayer | None:
    """A quantized layer as it is stored; None for any other layer, and where that does not compute the same."""
    if hasattr(layer, "_hf_hook"):
        return None
    if hasattr(layer, "weight_packed"):  # of compressed-tensors, which unpacks all layers in the model's first pass
        from compressed_tensors.compressors.base import decompress_module

        layer = copy.deepcopy(layer)
        decompress_module(layer)
    weight = find_blocks(layer) if isinstance(layer, nn.Linear) else find_halves(layer)
    if weight is None:
        return None
    bias = None if layer.bias is None else layer.bias.float()
    stored = make_stored(weight, bias)
    inputs = torch.randn(7, weight.inputs, generator=torch.Generator().manual_seed(0))
    return stored if agree(PackedLinear(stored)(inputs), layer(inputs)) else None


def find_halves(layer: Any) -> Weight | None:
    """The weight of a layer that does not show it, from outputs for unit vectors; None if 16 bits do not hold it.

    Layers that cannot be asked like that have none either: those of another device, and those that raise.
    """
    if waits(layer.qweight):
        return None
    dtypes, bias = [torch.float16, torch.bfloat16], None
    try:
        bias, layer.bias = layer.bias, None
        values = torch.empty(layer.out_features, layer.in_features)
        for columns in torch.arange(layer.in_features).split(UNITS):
            outputs = layer(nn.functional.one_hot(columns, layer.in_features).float())
            dtypes = [dtype for dtype in dtypes if torch.equal(outputs.to(dtype).float(), outputs)]
            if not dtypes:
                return None
            values[:, columns] = outputs.T
    except Exception:  # anything from the layer's package
        return None
    finally:
        if bias is not None:
            layer.bias = bias
    return Weight.dense(values.to(dtypes[0]))


def find_blocks(layer: Any) -> Weight | None:
    """The weight of a layer in blocks, from its values and scales; None without scales or if blocks do not hold it."""
    weight: Any = getattr(layer, "weight", None)
    places = (layer, "weight_scale"), (weight, "scale"), (weight, "_scale")  # compressed-tensors, torchao, quanto
    scales = next((getattr(owner, name) for owner, name in places if hasattr(owner, name)), None)
    if not isinstance(weight, Tensor) or not isinstance(scales, Tensor):
        return None
    if weight.dtype != torch.float32 or waits(weight):
        return None
    return make_blocks(weight.detach() if type(weight) is nn.Parameter else weight.dequantize(), scales.detach())


def make_blocks(values: Tensor, scales: Tensor) -> Weight | None:
    """A weight [N, K] in blocks; None if its values are not integers of at most 8 bits times their scales.

    scales: a single one, or [N, groups], each for K / groups inputs, which must be a multiple of 32. The integers may
    count from any zero point: it is found from the values.
    """
    outputs, inputs = values.shape
    groups = max(1, scales.numel() // outputs)
    if scales.numel() not in (1, outputs * groups) or inputs % (GROUP * groups):
        return None
    scale = scales.float().reshape(-1, groups).expand(outputs, groups)
    scale = scale.repeat_interleave(inputs // (GROUP * groups), dim=1)[..., None]
    values = values.reshape(outputs, -1, GROUP)
    lowest, highest = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    middle = lowest + ((highest - lowest) / scale).nan_to_num().round().div(2).ceil() * scale
    allowed = ROUNDING * values.abs().amax(-1, keepdim=True)
    for (bits, has_minimum), form in FLOAT_BLOCKS.items():
        half = 1 << bits - 1
        minimum = middle if has_minimum else torch.zeros_like(middle)
        numbers = ((values - minimum) / scale).nan_to_num().round().clamp(-half, half - 1)
        if bool(((numbers * scale + minimum - values).abs() <= allowed).all()):
            stored = numbers.to(torch.int8).view(torch.uint8)
            if bits == 4:
                stored = stored[..., :16] + 8 | stored[..., 16:] + 8 << 4
            heads = [scale, minimum] if has_minimum else [scale]
            return Weight(_join(*heads, stored), form, inputs)
    return None


@torch.no_grad()
def round_layers(module: nn.Module) -> None:
    """Make linear layers stored ones, in place, with weights rounded to 8 bits: for drafts, which need not be exact."""
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if not can_pack(layer) or type(layer) is not nn.Linear:
                continue
            weight = layer.weight.detach()
            is_in_blocks = weight.dtype == torch.float32 and layer.in_features % GROUP == 0
            if is_in_blocks and bool(weight.isfinite().all()):  # others are refused by name when they are packed
                setattr(parent, name, StoredLayer(round_weight(weight), layer))


def round_weight(values: Tensor) -> Weight:
    """A finite weight [N, K] in blocks of 8 bits. K must be a multiple of 32."""
    groups = values.float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    numbers = (groups / scale).nan_to_num().round().to(torch.int8)
    return Weight(_join(scale, numbers.view(torch.uint8)), FLOAT_BLOCKS[8, False], values.shape[1])


def _join(*parts: Tensor) -> Tensor:
    """The bytes of blocks [N, G, parts] by row: [N, bytes]."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1).flatten(1)
