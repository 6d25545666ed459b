"""Packing a model's layers changes its speed and nothing else."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from decode import Target, generate
from decode.cpu import backend, native_ops, packed_linear
from decode.cpu.packed_linear import TOLERANCE, OneDnnLinear, PackedLinear, can_pack, pack_linear
from decode.devices.attention import grouped_attention
from decode.models.fingerprint import fingerprint_weights
from decode.weights.layers import MergedLinear, MergedPart, PackedLayer
from proposers import MedusaProposer, NGramProposer
from tests.support.drafting import make_head
from tests.support.models import needs_compiler, tiny
from tests.support.quantized import Quantized

DTYPES = [torch.float32, torch.bfloat16]
has_onednn = {torch.float32: True, torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported()}


def use_onednn(monkeypatch: pytest.MonkeyPatch, reason: str = "no compiler") -> None:
    """Do as if the ops could not be compiled."""
    for module in (backend, native_ops, packed_linear):
        monkeypatch.setattr(module, "load_native_ops", cache(lambda: reason))


@pytest.fixture(params=[PackedLinear, OneDnnLinear])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """The class of packed layers, with and without a compiler."""
    if request.param is OneDnnLinear:
        use_onednn(monkeypatch)
    return request.param


@pytest.mark.parametrize(("dtype", "bias", "outputs"), [*product(DTYPES, [False, True], [100, 97])])
@needs_compiler
def test_a_packed_layer_computes_the_same_as_the_dense_one(
    form: type[nn.Module], dtype: torch.dtype, bias: bool, outputs: int
) -> None:
    if form is OneDnnLinear and not has_onednn[dtype]:
        pytest.skip("this CPU has no bfloat16 matrix kernels")
    torch.manual_seed(0)
    linear = nn.Linear(64, outputs, bias=bias, dtype=dtype)
    packed = packed_linear.pack_linear(linear)
    assert type(packed) is form
    for shape in ((), (1,), (1, 1), (2, 1), (1, 2), (3,), (5,), (2, 7), (4, 16), (2, 200), (0, 4)):
        inputs = torch.randn(*shape, 64, dtype=dtype)
        exact = nn.functional.linear(inputs.double(), linear.weight.double(), linear.bias.double() if bias else None)
        allowed = 2 * (linear(inputs).double() - exact).abs() + (1e-6 if dtype == torch.float32 else 2e-3)
        assert packed(inputs).shape == exact.shape
        assert ((packed(inputs).double() - exact).abs() <= allowed.amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@needs_compiler
def test_weights_are_unpacked_for_many_rows(monkeypatch: pytest.MonkeyPatch, bias: bool, dtype: torch.dtype) -> None:
    """In parts. Few rows, and all of them afterwards, have the op's bits."""
    monkeypatch.setattr(packed_linear, "UNPACKED", 512 * 40)
    monkeypatch.setattr(packed_linear, "has_bfloat16_products", lambda: True)
    torch.manual_seed(0)
    linear = nn.Linear(512, 96, bias=bias, dtype=dtype)
    packed, inputs = pack_linear(linear), torch.randn(2, 200, 512, dtype=dtype)
    before = packed(inputs)
    parts, unpack = list[int](), PackedLinear.rows
    monkeypatch.setattr(PackedLinear, "rows", lambda self, part: parts.append(len(part)) or unpack(self, part))
    with packed_linear.expecting_many_rows():
        found = packed(inputs)
        assert parts == [40, 40, 16]
        assert torch.equal(packed(inputs[:1]), before[:1])
    assert torch.equal(packed(inputs), before) and len(parts) == 3
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found, linear(inputs), rtol=tolerance, atol=tolerance)


def test_merged_layers_compute_the_same_as_separate_ones() -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(32, size, bias=bias) for size, bias in [(24, True), (8, False), (40, True)]]
    merged = MergedLinear(linears, pack_linear)
    parts = [MergedPart(merged, index) for index in range(3)]
    one, other = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    # Also if parts get different tensors, are called out of order, or not all are called.
    for inputs in ([one, one, one], [one, other, one], [other, one, one]):
        for order in ([0, 1, 2], [2, 0, 1], [1], [0, 0, 1]):
            for index in order:
                expected = linears[index](inputs[index])
                assert torch.allclose(parts[index](inputs[index]), expected, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_that_are_no_multiples_of_anything(form: type[nn.Module], dtype: torch.dtype, tied: bool) -> None:
    """An odd vocabulary, narrow heads, biases, one key-value head."""
    if form is OneDnnLinear and not has_onednn[dtype]:
        pytest.skip("this CPU has no bfloat16 matrix kernels")
    sizes = {"vocab_size": 101, "hidden_size": 27, "intermediate_size": 33, "head_dim": 6, "num_attention_heads": 3}
    biases = {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    model = tiny("llama", dtype=dtype, **sizes, **biases)
    packed, ids = Target(model, accelerate="packed").model, torch.arange(33).view(3, 11)
    assert isinstance(packed.lm_head, PackedLayer)
    expected, found = (each(ids).logits.float() for each in (model, packed))
    assert (expected - found).abs().max() < (1e-4 if dtype == torch.float32 else 0.2) * expected.std()
    if dtype == torch.float32:
        targets = Target(model), Target(model, accelerate="packed")
        assert torch.equal(targets[0].output_matrix, targets[1].output_matrix)
        answers = [generate(target, [[5], [6, 7]], NGramProposer(), max_new_tokens=20) for target in targets]
        assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]


@needs_compiler
@pytest.mark.parametrize(("before", "after"), [*product(DTYPES, [torch.float64, torch.float16]), DTYPES, DTYPES[::-1]])
def test_a_packed_model_in_another_dtype_is_right_or_fails(
    form: type[nn.Module], before: torch.dtype, after: torch.dtype
) -> None:
    model = tiny("llama", dtype=before, vocab_size=101)
    packed, ids = Target(model, accelerate="packed").model, torch.tensor([[5, 6, 7, 8]])
    packed = packed.to(after)  # shares tensors with the model, which changes too
    expected = tiny("llama", dtype=before, vocab_size=101).to(after)(ids).logits.float()
    if form is OneDnnLinear and isinstance(packed.lm_head, PackedLayer):  # some CPUs have no bfloat16 matrix kernels
        with pytest.raises(RuntimeError):
            packed(ids)
    else:
        allowed = 1e-4 if after == torch.float64 else 0.3
        assert (packed(ids).logits.float() - expected).abs().max() < allowed * expected.std()
        assert packed.lm_head.weight.dtype == after


def test_later_changes_of_the_model_do_not_change_packed_weights() -> None:
    """They take effect only in part: norms and embeddings are shared."""
    model = tiny("llama", dtype=torch.float32)
    packed, ids = Target(model, accelerate="packed").model, torch.tensor([[5, 6, 7]])
    assert packed.model.embed_tokens.weight is model.model.embed_tokens.weight and type(model.lm_head) is nn.Linear
    before = packed(ids).logits
    model.model.layers[0].mlp.down_proj.weight.data.zero_()
    assert torch.equal(packed(ids).logits, before)
    model.model.norm.weight.data.mul_(2)
    assert torch.allclose(packed(ids).logits, 2 * before, atol=1e-4)


def test_dense_weights_are_freed_and_packed_ones_not_packed_again() -> None:
    model = Target(tiny("llama", dtype=torch.float32, tie_word_embeddings=True), accelerate="auto", in_place=True).model
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert [name for name, _ in model.named_parameters() if "norm" not in name] == ["model.embed_tokens.weight"]
    target = Target(model, accelerate="auto")
    assert target.model is model
    proposer = MedusaProposer(make_head("medusa", target)).prepare(target)
    packed = proposer.head
    assert proposer.prepare(target).head is packed


def test_what_cannot_be_packed_is_left_alone() -> None:
    assert not can_pack(nn.Linear(4, 4, dtype=torch.float64))
    assert not can_pack(nn.Linear(4, 4, device="meta"))
    assert not can_pack(nn.Embedding(4, 4))
    model = Target(tiny("llama"), accelerate="auto").model
    assert type(model.lm_head) is nn.Linear


def test_a_padding_mask_still_works_on_a_packed_model() -> None:
    """A call of the model with transformers' ordinary 2-D mask returns the stock model's logits."""
    model = tiny("llama", dtype=torch.float32)
    ids = torch.tensor([[0, 0, 5, 6], [3, 4, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    stock = model(ids, attention_mask=mask).logits[:, 2:]
    packed = Target(model, accelerate="auto").model(ids, attention_mask=mask).logits[:, 2:]
    assert torch.allclose(stock, packed, atol=1e-5)


@pytest.mark.parametrize("place", range(3))
def test_grouped_attention_has_the_gradients_of_transformers(place: int) -> None:
    """Of queries, keys or values alone, as for an adapter on one of them."""
    torch.manual_seed(0)
    module = nn.Module()
    module.num_key_value_groups = 2
    states = [torch.randn(1, heads, 5, 8) for heads in (4, 2, 2)]
    mask = torch.zeros(1, 1, 5, 5).masked_fill_(torch.ones(5, 5).triu(1) > 0, torch.finfo(torch.float32).min)
    gradients: list[Tensor] = []
    for attend in (sdpa_attention_forward, grouped_attention):
        parts = [part.clone().requires_grad_(index == place) for index, part in enumerate(states)]
        attend(module, *parts, mask)[0].square().sum().backward()
        assert parts[place].grad is not None
        gradients.append(parts[place].grad)
    assert torch.allclose(*gradients, atol=1e-5)


@needs_compiler
def test_quantized_weights_keep_their_own_product() -> None:
    """Also in a layer that would be merged with others. The fingerprint is that of the values."""
    plain, model = tiny("llama", dtype=torch.float32), tiny("llama", dtype=torch.float32)
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.mlp.down_proj):
            linear.weight = nn.Parameter(Quantized(linear.weight.detach()), requires_grad=False)
    target = Target(model, accelerate="packed")
    layer = target.model.model.layers[0]
    assert type(layer.mlp.down_proj) is type(layer.self_attn.q_proj) is nn.Linear
    assert isinstance(layer.self_attn.o_proj, PackedLinear)
    assert target.weights_fingerprint == fingerprint_weights(plain)
    prompt = torch.tensor([[5, 6, 7, 5, 6]])
    expected = plain.generate(prompt, max_new_tokens=12, do_sample=False)[0, 5:].tolist()
    assert generate(target, prompt.tolist(), "ngram", max_new_tokens=12)[0].tokens == expected
