"""Linear layers with packed weights, for inference on a CPU.

A decoding step on a CPU reads every weight once. `F.linear` on a few rows reads them at a third of the memory's
bandwidth. The project's own op reads packed weights at nearly all of it, for up to a dozen rows. Without a C++
compiler, oneDNN's packed layers take its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from platform import machine
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call

from decode.cpu.native_ops import DIGITS_AT, list_forms, load_native_ops, pack, unpack
from decode.devices.transfer import waits
from decode.weights.blocks import StoredLayer, Weight
from decode.weights.layers import (
    BAD_WEIGHT,
    LiveWeights,
    PackedLayer,
    find_bad_weight,
    join_biases,
    join_linears,
    merge_layers,
)

LAYOUT_ROWS = 16  # oneDNN: a layout for 16 rows is fast for 1 to 64; one for a single row is slower even with one row
MIN_ROWS, PADDED_ROWS = 3, 5  # oneDNN: with fewer rows inputs are padded: one takes 10 % longer than five, two 33 %
MANY_ROWS = 256  # see `expecting_many_rows`
UNPACKED = 1 << 24  # weights that are unpacked at a time
SAMPLE = 64  # outputs of a stored weight that are checked
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the op's outputs, as a share of the largest

_unpacks = ContextVar("_unpacks", default=False)


def can_pack(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether this layer can be packed on this machine."""
    if isinstance(module, StoredLayer):
        return not isinstance(module.module, nn.Embedding)
    if type(module) is not nn.Linear or type(getattr(module, "weight", None)) is not nn.Parameter:
        return False  # a quantized weight has a product of its own
    if hasattr(module, "quantization_scheme"):  # of compressed-tensors: it may quantize its inputs
        return False
    if waits(module.weight) or hasattr(module, "_hf_hook"):
        return False
    dtype = module.weight.dtype
    return dtype in TOLERANCE and (load_native_ops() is None or _is_supported_by_onednn(dtype))


def _is_supported_by_onednn(dtype: torch.dtype) -> bool:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def has_bfloat16_products() -> bool:
    """Whether this CPU has instructions for them. On older ones with AVX-512, oneDNN only emulates them."""
    if not torch.backends.mkldnn.is_available():
        return False
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and (native or machine() not in ("x86_64", "AMD64"))


@contextmanager
def expecting_many_rows() -> Iterator[None]:
    """`PackedLinear` multiplies `MANY_ROWS` rows or more with unpacked weights, in bfloat16 where the CPU has products
    of it.

    The op unpacks blocks again for every few rows, and has no matrix instructions of bfloat16. A pass over 4,096 tokens
    in float32 takes 0.62 of the time on a CPU without AVX-512; one over 2,000 in bfloat16 0.36 with AMX. Not for
    decoding: there a row's result must not depend on the other rows.
    """
    token = _unpacks.set(True)
    try:
        yield
    finally:
        _unpacks.reset(token)


class PackedLinear(PackedLayer):
    """`nn.Linear`, or several as one, on packed weights. What the op does not take goes through the unpacked weight.

    float32 weights that bfloat16 holds exactly, as those of most published models, are stored in half the memory, and
    those of a file with blocks of a few bits as they are. The arithmetic stays float32. Halved weights give the same
    bits as full ones; blocks are summed with their scales apart, so they round a little less than unpacked weights.

    Raises RuntimeError if the op computes something else than the layer.
    """

    def __init__(self, *linears: nn.Linear | StoredLayer) -> None:
        super().__init__()
        self.in_features, self.out_features = linears[0].in_features, sum(linear.out_features for linear in linears)
        self.dtype, bias = linears[0].weight.dtype, join_biases(linears)
        self.packed = nn.Buffer(_pack(linears), persistent=False)
        self._live = LiveWeights(linears)
        self._packed_for, self._can_run = self.dtype, True
        self.bias = None if bias is None else nn.Buffer(bias, persistent=False)
        self.eval()
        self._check(linears)

    def forward(self, inputs: Tensor, ends: Tensor | None = None) -> Tensor:
        """Outputs [..., N] for inputs [..., K]. ends [E]: where the rows [S, K] of each of E experts end, whose weights
        are one below the other; then outputs are [S, N / E]. None: all rows meet all weights."""
        experts, is_own = 1 if ends is None else len(ends), inputs.dtype == self.dtype
        has_many_rows = _unpacks.get() and inputs.numel() >= MANY_ROWS * self.in_features * experts
        if has_many_rows and is_own and (self.dtype == torch.float32 or has_bfloat16_products()):
            return self._multiply_parts(inputs) if ends is None else self._multiply_experts(inputs, ends)
        if not is_own or not self._can_run or (torch.is_grad_enabled() and inputs.requires_grad):
            if ends is not None:
                return self._multiply_experts(inputs, ends)
            return nn.functional.linear(inputs, self.dense_weight(), self.bias)
        if self.in_features % 2 and self.dtype == torch.bfloat16:
            inputs = nn.functional.pad(inputs, (0, 1))  # these weights are read in pairs
        outputs: Tensor = torch.ops.draftless.packed_linear(
            inputs, self.packed, self.bias, self.out_features // experts, ends
        )
        return outputs

    def _multiply_parts(self, inputs: Tensor) -> Tensor:
        """By unpacked weights, a part of the outputs at a time."""
        parts = torch.arange(self.out_features).split(max(1, UNPACKED // self.in_features))
        found = torch.cat([nn.functional.linear(inputs, self.rows(part)) for part in parts], dim=-1)
        return found if self.bias is None else found.add_(self.bias)

    def _multiply_experts(self, inputs: Tensor, ends: Tensor) -> Tensor:
        """By unpacked weights, an expert at a time."""
        outputs, begin = self.out_features // len(ends), 0
        found = inputs.new_empty(len(inputs), outputs)
        for expert, end in enumerate(ends.tolist()):
            if begin < end:
                rows = torch.arange(expert * outputs, (expert + 1) * outputs)
                bias = None if self.bias is None else self.bias[rows]
                found[begin:end] = nn.functional.linear(inputs[begin:end], self.rows(rows), bias)
            begin = end
        return found

    @property
    def digits(self) -> int:
        """The bytes of the integers that inputs are rounded to; 0 if they are not, or no weight is in blocks."""
        return int(self.packed[DIGITS_AT].view(torch.int64))

    @digits.setter
    def digits(self, digits: int) -> None:
        self.packed[DIGITS_AT].view(torch.int64).fill_(digits)

    def extra_repr(self) -> str:
        forms = sorted({form for form, _ in list_forms(self.packed)})  # few bits are read sooner: nodes cost more
        return f"digits={self.digits}, forms={', '.join(forms)}"

    def dense_weight(self) -> Tensor:
        return self.rows(torch.arange(self.out_features))

    @torch.inference_mode()  # the target may have been made in it
    def repack(self) -> bool:
        if not (linears := self._live.find_written()):
            return True
        packed = _pack(linears)
        if packed.shape != self.packed.shape:  # weights that bfloat16 holds exactly take half the memory
            return False
        self.packed.copy_(packed)
        if self.bias is not None and (bias := join_biases(linears)) is not None:
            self.bias.copy_(bias)
        return True

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows of the weight, [..., K] for row numbers [...]."""
        return unpack(self.packed, numbers)[..., : self.in_features].to(self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        like = fn(torch.empty(0, dtype=self.dtype))  # `packed` does not tell the dtype
        self.dtype, self._can_run = like.dtype, like.dtype == self._packed_for and not waits(like)
        return super()._apply(fn, recurse)

    @torch.no_grad()
    def _check(self, linears: Sequence[nn.Linear | StoredLayer]) -> None:
        inputs = torch.randn(7, self.in_features, generator=torch.Generator().manual_seed(0)).to(self.dtype)
        begin, found = 0, self(inputs)
        for linear in linears:
            if isinstance(linear, nn.Linear):
                expected = linear(inputs)
            else:  # of the first outputs: all of a large weight would have to be unpacked
                rows = self.rows(torch.arange(begin, begin + min(SAMPLE, linear.out_features)))
                expected = nn.functional.linear(inputs, rows, None if linear.bias is None else linear.bias[: len(rows)])
            if not agree(found[:, begin : begin + expected.shape[1]], expected):
                raise RuntimeError("the linear op does not compute what the layer does")
            begin += linear.out_features


def agree(found: Tensor, expected: Tensor, layers: int = 1) -> bool:
    """Whether these are the same outputs up to the rounding of so many layers."""
    error = (found.float() - expected.float()).abs().max()
    return bool(error <= layers * TOLERANCE[expected.dtype] * expected.float().abs().max())


def _pack(linears: Sequence[nn.Linear | StoredLayer]) -> Tensor:
    return pack(
        *(each.stored if isinstance(each, StoredLayer) else Weight.dense(_halve(each.weight)) for each in linears)
    )


def _halve(weight: Tensor) -> Tensor:
    """A weight in bfloat16 if that holds it exactly, else the weight. In bfloat16 inputs are read in pairs."""
    weight = weight.detach()
    if weight.dtype == torch.float32 and weight.shape[1] % 2 == 0 and _holds(weight[:1].bfloat16(), weight[:1]):
        half = weight.bfloat16()  # the first output tells most of those that it does not hold
        return half if _holds(half, weight) else weight
    return nn.functional.pad(weight, (0, 1)) if weight.dtype == torch.bfloat16 and weight.shape[1] % 2 else weight


def _holds(half: Tensor, weight: Tensor) -> bool:
    return torch.equal(half.float(), weight)


class PackedEmbedding(nn.Module):
    """An embedding with the rows of a packed layer, often the output layer. They are unpacked as they are looked up."""

    def __init__(self, layer: PackedLinear, module: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.module = None if type(module) is nn.Embedding else module  # Gemma's scale what they look up
        if self.module is not None:
            self.module.weight = nn.Parameter(torch.empty(0, layer.in_features, dtype=layer.dtype), requires_grad=False)
        self.eval()

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.layer.rows(ids)
        if self.module is None:
            return rows
        numbers = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        scaled: Tensor = functional_call(self.module, {"weight": rows.flatten(0, -2)}, (numbers,))
        return scaled


class OneDnnLinear(PackedLayer):
    """`nn.Linear` on weights that oneDNN packed. For inference only."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linears[0].in_features, sum(each.out_features for each in linears)
        self.dtype = linears[0].weight.dtype
        self._live = LiveWeights(linears)
        self._pack(linears)
        self.eval()

    def _pack(self, linears: Sequence[nn.Linear]) -> None:
        linear = linears[0] if len(linears) == 1 else join_linears(*linears)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), LAYOUT_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def repack(self) -> bool:
        if linears := self._live.find_written():
            self._pack(linears)
        return True

    def forward(self, inputs: Tensor) -> Tensor:
        rows, padded = inputs.numel() // inputs.shape[-1], inputs
        if inputs.dim() > 1 and 0 < rows < MIN_ROWS:
            padded = torch.cat([inputs] * -(-PADDED_ROWS // rows))  # the fastest way to add rows
        outputs = torch.ops.mkldnn._linear_pointwise(padded, self.packed, self.bias, "none", [], "")
        return outputs if padded is inputs else outputs[: inputs.shape[0]]

    def dense_weight(self) -> Tensor:
        return self.packed.to_dense().detach()


def pack_linear(*linears: nn.Linear) -> PackedLinear | OneDnnLinear:
    """The packed form of a layer, or of several as one."""
    return PackedLinear(*linears) if load_native_ops() is None else OneDnnLinear(*linears)


def pack_layers(module: nn.Module, *, has_adapters: bool = True) -> None:
    """Pack all linear layers of a module, in place.

    Layers that cannot be packed (on another device, in float64, quantized, offloaded) stay as they are. has_adapters:
    those in an `nn.ModuleDict` stay too. They may be of peft, which reads their weights.
    Raises ValueError with the name of a weight that is NaN or infinite.
    """
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, StoredLayer)]
    stored = {id(layer.stored): name for name, layer in layers if can_pack(layer)}
    try:
        merge_layers(module, can_pack, pack_linear)
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if can_pack(child) and not (has_adapters and isinstance(parent, nn.ModuleDict)):
                    setattr(parent, name, pack_linear(child))
        for name, embedding in list(module.named_modules()):
            if isinstance(embedding, StoredLayer):  # all others are packed
                twin: Any = stored.get(id(embedding.stored))
                layer: Any = PackedLinear(embedding) if twin is None else module.get_submodule(twin)
                module.set_submodule(name, PackedEmbedding(layer, embedding.module))
    except RuntimeError as error:
        if weight := find_bad_weight(module):
            raise ValueError(f"the weight {weight} {BAD_WEIGHT}") from error
        raise
