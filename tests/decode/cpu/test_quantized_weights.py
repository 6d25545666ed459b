"""Layers of quantized checkpoints: packed in blocks where these compute the same, else left as they are."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode import Target, generate
from decode.cpu.native_ops import pack, unpack
from decode.cpu.packed_linear import PackedLinear
from decode.cpu.quantized_weights import find_stored, make_blocks
from decode.weights.blocks import FLOAT_BLOCKS
from decode.weights.layers import MergedPart
from tests.support.models import needs_compiler, tiny
from tests.support.quantized import HiddenLayer, Quantized, round_to

pytestmark = [needs_compiler, pytest.mark.usefixtures("ops")]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.mark.parametrize("group", [32, 64, 192])
@pytest.mark.parametrize("zero", [None, 0.25, 0.3])
@pytest.mark.parametrize(("bits", "stored"), [(3, 4), (4, 4), (6, 8), (8, 8)])
def test_blocks_hold_the_values_and_give_their_products(bits: int, stored: int, zero: float | None, group: int) -> None:
    """Zero points may be fractions."""
    torch.manual_seed(0)
    values, scales = round_to(bits, torch.randn(71, 192), group, zero)
    weight = make_blocks(values, scales)
    assert weight is not None
    if zero is None or bits in (4, 8):
        assert weight.form == FLOAT_BLOCKS[stored, zero is not None]
    packed = pack(weight)
    error = (unpack(packed, torch.arange(71)) - values).abs()
    assert bool((error <= 2.0**-22 * values.abs().amax(1, keepdim=True)).all())
    for rows in (*range(1, 8), 20):
        inputs = torch.randn(rows, 192)
        exact, sizes = inputs.double() @ values.double().T, inputs.double().abs() @ values.double().abs().T
        found = torch.ops.draftless.packed_linear(inputs, packed, None, 71)
        assert bool(((found.double() - exact).abs() <= 2.0**-20 * sizes).all())


def test_one_scale_for_all() -> None:
    values = torch.randint(-8, 8, (5, 64)) * 0.1
    weight = make_blocks(values, torch.tensor([0.1]))
    assert weight is not None and torch.equal(unpack(pack(weight), torch.arange(5)), values)


def test_what_blocks_cannot_hold() -> None:
    torch.manual_seed(0)
    values, scales = round_to(4, torch.randn(6, 96), 32)
    assert make_blocks(values, scales) is not None
    assert make_blocks(values, scales[:, :2]) is None  # groups that inputs cannot be split into
    assert make_blocks(values[:, :80], scales[:, :1]) is None  # inputs that are no multiple of 32
    assert make_blocks(values, scales.flip(0)) is None  # the scales of other outputs
    assert make_blocks(torch.randn(6, 96), scales) is None  # no integers
    assert make_blocks(torch.randint(-300, 300, (6, 96)) * 0.5, torch.tensor(0.5)) is None  # more than 8 bits
    assert make_blocks(values.clone().fill_(torch.nan), scales) is None


def quantize(model: PreTrainedModel, bits: int, settings: Any = None) -> PreTrainedModel:
    """Quantize the layers in place as torchao does."""
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear):
            weight = Quantized(*round_to(bits, layer.weight.detach(), 32), settings)
            layer.weight = nn.Parameter(weight, requires_grad=False)
    return model


def assert_same_text(target: Target, model: PreTrainedModel) -> None:
    prompt = torch.tensor([[5, 6, 7, 5, 6]])
    expected = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, 5:].tolist()
    for proposer in (None, "ngram"):
        assert generate(target, prompt.tolist(), proposer, max_new_tokens=12)[0].tokens == expected


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model_is_packed_from_its_own_scales(bits: int) -> None:
    model = quantize(tiny("llama", dtype=torch.float32, **SIZES), bits)
    target = Target(model, accelerate="packed")
    packed = [layer for layer in target.model.model.layers.modules() if isinstance(layer, PackedLinear)]
    assert len(packed) == 8 and isinstance(target.model.model.layers[0].self_attn.q_proj, MergedPart)
    count = sum(layer.weight.numel() for layer in model.model.layers.modules() if isinstance(layer, nn.Linear))
    assert 8 * sum(layer.packed.nbytes for layer in packed) < 2 * (bits + 1) * count  # panels of few outputs
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, Quantized)  # the given model stays
    assert_same_text(target, model)


def test_layers_that_compute_something_else_stay() -> None:
    """With quantized inputs, in another dtype, or on another device."""
    values, scales = round_to(4, torch.randn(8, 64), 32)

    def make(weight: Tensor, dtype: torch.dtype = torch.float32) -> nn.Linear:
        linear = nn.Linear(64, 8, dtype=dtype)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return linear

    assert find_stored(make(Quantized(values, scales))) is not None
    assert find_stored(make(Quantized(values, scales, SimpleNamespace()))) is None
    assert find_stored(make(Quantized(values.bfloat16(), scales.bfloat16()), torch.bfloat16)) is None
    assert find_stored(make(Quantized(values))) is None
    assert find_stored(make(values)) is None
    model = quantize(tiny("llama", dtype=torch.float32, **SIZES), 4, SimpleNamespace())
    kept = Target(model, accelerate="packed").model.model.layers[0].mlp.down_proj
    assert type(kept) is nn.Linear


def test_layers_of_compressed_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no weight before the model's first pass, which unpacks them."""
    values, scales = round_to(4, torch.randn(8, 64), 64)

    def unpack_weight(layer: Any) -> None:
        layer.weight = nn.Parameter(layer.weight_packed * layer.weight_scale, requires_grad=False)
        del layer.weight_packed

    package = SimpleNamespace(decompress_module=unpack_weight)
    monkeypatch.setitem(sys.modules, "compressed_tensors.compressors.base", package)
    layer: Any = nn.Linear(64, 8)
    del layer.weight
    layer.weight_packed, layer.weight_scale = nn.Buffer((values / scales).round()), nn.Buffer(scales)
    layer.quantization_scheme = SimpleNamespace(input_activations=None)
    stored = find_stored(layer)
    assert stored is not None and not hasattr(layer, "weight")
    assert torch.equal(unpack(pack(stored.stored), torch.arange(8)), (values / scales).round() * scales)
    unpack_weight(layer)
    assert find_stored(layer) is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_that_do_not_show_their_weight(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQ and AWQ: the values are those that the layer computes with, 16 bits each, whatever its integers are."""
    monkeypatch.setattr("decode.cpu.quantized_weights.UNITS", 40)  # fewer than there are inputs
    torch.manual_seed(0)
    values, bias, inputs = torch.randn(8, 96).to(dtype), torch.randn(8).half(), torch.randn(3, 96)
    layer = HiddenLayer(values, bias)
    stored = find_stored(layer)
    assert stored is not None and layer.bias is bias
    assert torch.equal(unpack(pack(stored.stored), torch.arange(8)), values.float())
    assert torch.allclose(PackedLinear(stored)(inputs), layer(inputs), rtol=0, atol=1e-4)
    assert find_stored(HiddenLayer(torch.randn(8, 96))) is None, "16 bits do not hold it"
    assert find_stored(HiddenLayer(values, bias, rounds_inputs=True)) is None
    assert find_stored(HiddenLayer(torch.full((8, 96), torch.nan))) is None
    assert find_stored(HiddenLayer(values, dtype=torch.float16)) is None


@pytest.mark.parametrize("missing", ["in_features", "bias", "_values"])
def test_layers_that_cannot_be_asked_stay(missing: str) -> None:
    """They have other names for their sizes, or raise."""
    layer = HiddenLayer(torch.ones(8, 96))
    delattr(layer, missing)
    assert find_stored(layer) is None


def test_linear_layers_with_a_quantized_weight_are_read_by_their_scales() -> None:
    """Also where they call it as GPTQ's layers do: optimum-quanto has a property `qweight`."""

    class QuantoLinear(nn.Linear):
        @property
        def qweight(self) -> Tensor:
            return self.weight

    layer = QuantoLinear(64, 8)
    layer.weight = nn.Parameter(Quantized(*round_to(4, torch.randn(8, 64), 32)), requires_grad=False)
    stored = find_stored(layer)
    assert stored is not None and stored.stored.form == FLOAT_BLOCKS[4, False]


def test_a_model_whose_layers_do_not_show_their_weight_is_packed() -> None:
    model = tiny("llama", dtype=torch.float32, **SIZES)
    for parent in list(model.model.layers.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(parent, name, HiddenLayer(layer.weight.detach().half()).eval())
    target = Target(model, accelerate="packed")
    assert not any(isinstance(layer, HiddenLayer) for layer in target.model.modules())
    assert isinstance(target.model.model.layers[0].self_attn.q_proj, MergedPart)
    assert isinstance(model.model.layers[0].mlp.up_proj, HiddenLayer)  # the given model stays
    assert_same_text(target, model)


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_torchao(name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, ids = tiny("llama", dtype=torch.float32, **SIZES), torch.tensor([[5, 6, 7]])
    quantization.quantize_(model.model, getattr(quantization, name)())
    target = Target(model, accelerate="packed")
    assert not any(isinstance(layer, nn.Linear) for layer in target.model.modules())
    assert torch.allclose(target.model(ids).logits, model(ids).logits, atol=1e-4)
