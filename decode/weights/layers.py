"""Linear layers in other forms than a model's own: packed, or several as one.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from decode.weights.blocks import StoredExperts, StoredLayer, Weight

# Layers that most models call with the same tensor. As one larger layer they need fewer calls.
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# An input of a merged layer, its outputs, and the parts that were not called with it yet.
NOTHING: tuple[Tensor | None, tuple[Tensor, ...], frozenset[int]] = None, (), frozenset()
SAMPLES = 64  # elements of a tensor that are compared to find out whether it was written
BAD_WEIGHT = "has values that are NaN or infinite, so no logits can be computed; check the file, or try another --dtype"


class PackedLayer(nn.Module, ABC):
    """Stands in the place of an `nn.Linear`, or of several."""

    in_features: int
    out_features: int
    dtype: torch.dtype

    @property
    def weight(self) -> Tensor:
        """The shape [N, K], dtype and device of the weight, which models ask for. Its values are NaN."""
        return torch.full((), torch.nan, dtype=self.dtype).expand(self.out_features, self.in_features)

    @abstractmethod
    def dense_weight(self) -> Tensor:
        """The weight [N, K]."""

    @abstractmethod
    def repack(self) -> bool:
        """Pack the weights and biases that it was made from again, in place.

        Nothing is done if they are gone, or lie in blocks. Returns whether they still take as much memory as before.
        """


class LiveWeights:
    """The weights and biases of linear layers, as long as someone else uses them."""

    def __init__(self, linears: Sequence[nn.Linear | StoredLayer]) -> None:
        self._layers = [(ref(each.weight), None if each.bias is None else ref(each.bias)) for each in linears]
        self._marks = self._read_marks()

    def find_written(self) -> list[nn.Linear]:
        """Frozen layers with these tensors; none if no tensor was written since the last call, or if one is gone."""
        before, self._marks = self._marks, self._read_marks()
        if len(before) != len(self._marks):
            return []
        pairs = zip(before, self._marks, strict=True)
        if all(old == new and torch.equal(some, others) for (old, some), (new, others) in pairs):
            return []
        found = [(weight(), None if bias is None else bias()) for weight, bias in self._layers]
        return [make_linear(weight, bias) for weight, bias in found if weight is not None]

    def _read_marks(self) -> list[tuple[int, Tensor]]:
        """Torch's version of each tensor, and some of its elements."""
        tensors = [each() for layer in self._layers for each in layer if each is not None]
        return [(0 if each.is_inference() else each._version, sample(each)) for each in tensors if each is not None]


def sample(tensor: Tensor) -> Tensor:
    """Some `SAMPLES` elements of a tensor, evenly spread over its rows and columns."""
    return tensor.detach().flatten()[:: tensor.numel() // SAMPLES | 1].clone()  # an odd stride meets many columns


def refuse_gaps(report: Mapping[str, Any]) -> None:
    """Raise ValueError for missing or misshapen weights, which transformers would fill with random numbers."""
    misshapen = [key for key, *_ in report["mismatched_keys"]]
    for keys, fault in ((report["missing_keys"], "are missing"), (misshapen, "have other shapes than in config.json")):
        if keys:
            names = ", ".join(sorted(keys)[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise ValueError(f"weights {fault}: {names}")


def cast(model: Any, dtype: Any) -> Any:
    """The model in another dtype, in place. As in `from_pretrained`, rotary frequencies stay in float32: bfloat16 holds
    8 bits of them."""
    kept = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if name.endswith("inv_freq")
    ]
    model = model.to(dtype)
    for module, name, buffer in kept:
        module._buffers[name] = buffer
    return model


def find_bad_weight(module: nn.Module) -> str | None:
    """The name of the first weight with a value that is NaN or infinite; None without one. It reads all weights."""
    for name, weight in chain(module.named_parameters(), _unpack_weights(module)):
        is_readable = weight.is_floating_point() and not weight.is_meta
        if is_readable and not bool(weight.detach().float().isfinite().all()):
            return name
    return None


def _unpack_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights, by name, of layers that hold them in another form."""
    for name, layer in module.named_modules():
        if isinstance(layer, PackedLayer):
            yield f"{name}.weight", layer.dense_weight()
        elif isinstance(layer, StoredLayer):
            yield f"{name}.weight", layer.stored.rows()
        elif isinstance(layer, StoredExperts):
            yield from ((f"{name}.{kind}", stack.dense()) for kind, stack in layer.stored.items())


def make_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A frozen linear layer that shares these tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear.eval()


def make_stored(weight: Weight, bias: Tensor | None = None) -> StoredLayer:
    """A layer to be packed, with its weight as a file stores it."""
    return StoredLayer(weight, make_linear(torch.empty(len(weight.data), weight.inputs, device="meta"), bias))


def join_linears(*linears: nn.Linear) -> nn.Linear:
    """One layer with the outputs of all, concatenated."""
    return make_linear(torch.cat([linear.weight for linear in linears]), join_biases(linears))


def join_biases(linears: Sequence[nn.Linear | StoredLayer]) -> Tensor | None:
    """The layers' biases, concatenated: zeros for a layer without one, None if no layer has one."""
    if all(linear.bias is None for linear in linears):
        return None
    zeros = [linear.weight.new_zeros(linear.out_features) for linear in linears]
    pairs = zip(linears, zeros, strict=True)
    return torch.cat([zero if linear.bias is None else linear.bias.detach() for linear, zero in pairs])


def merge_layers(
    module: nn.Module, can_merge: Callable[[Any], bool], join: Callable[..., nn.Module] = join_linears
) -> None:
    """Merge the layers of a module that are called with the same tensor, in place.

    can_merge: whether a layer may be merged. join: from such layers to the one that is called.
    """
    for parent in list(module.modules()):
        for names in MERGED:
            linears: list[Any] = [getattr(parent, name, None) for name in names]
            if all(map(can_merge, linears)) and len({(each.in_features, each.weight.dtype) for each in linears}) == 1:
                merged = MergedLinear(linears, join)
                for index, name in enumerate(names):
                    setattr(parent, name, MergedPart(merged, index))


class MergedLinear(nn.Module):
    """Several linear layers as one, see `MergedPart`."""

    def __init__(self, linears: Sequence[nn.Linear], join: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layer = join(*linears)
        self.sizes = [linear.out_features for linear in linears]
        self._last = NOTHING
        self.eval()


class MergedPart(nn.Module):
    """One part of a merged layer, in the place of its `nn.Linear`."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self.merged, self.index = merged, index
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        """This part's outputs. The first part that is called with an input computes those of all parts."""
        merged = self.merged
        last_inputs, outputs, left = merged._last  # read once: another thread may run the same model
        if inputs is not last_inputs or self.index not in left:
            outputs, left = merged.layer(inputs).split(merged.sizes, dim=-1), frozenset(range(len(merged.sizes)))
        left -= {self.index}  # in any order: Falcon-H1 calls its up_proj first
        merged._last = (inputs, outputs, left) if left else NOTHING
        return outputs[self.index]

    @property
    def weight(self) -> Tensor:
        """As that of the whole layer."""
        return self._take(self.merged.layer.weight)

    @property
    def bias(self) -> Tensor | None:
        return None if self.merged.layer.bias is None else self._take(self.merged.layer.bias)

    def dense_weight(self) -> Tensor:
        """The weight [N, K]."""
        whole: Any = self.merged.layer
        return self._take(whole.dense_weight() if isinstance(whole, PackedLayer) else whole.weight)

    def _take(self, whole: Any) -> Tensor:
        part: Tensor = whole.split(self.merged.sizes)[self.index]
        return part
