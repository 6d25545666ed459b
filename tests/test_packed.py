"""Packing a model's layers changes its speed and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from decode import Target, generate
from decode.cpu.acceleration import accelerate, accelerated_copy
from decode.cpu.grouped_attention import grouped_sdpa
from decode.cpu.packed_linear import MergedLinear, MergedPart, PackedLinear, can_pack
from decode.kv_cache import LARGE
from proposers import MedusaProposer, NGramProposer
from tests.drafting import make_head
from tests.models import tiny

bf16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(
        not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 matrix kernels"
    ),
)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, bf16])
def test_a_packed_layer_computes_the_same_as_the_dense_one(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 100, bias=bias, dtype=dtype)
    packed = PackedLinear(linear)
    for shape in ((), (1,), (1, 1), (2, 1), (1, 2), (3,), (5,), (2, 7), (4, 16), (2, 200), (0, 4)):
        inputs = torch.randn(*shape, 64, dtype=dtype)
        exact = nn.functional.linear(inputs.double(), linear.weight.double(), linear.bias.double() if bias else None)
        allowed = 2 * (linear(inputs).double() - exact).abs() + (1e-6 if dtype == torch.float32 else 2e-3)
        assert packed(inputs).shape == exact.shape
        assert ((packed(inputs).double() - exact).abs() <= allowed.amax(-1, keepdim=True)).all()


def test_merged_layers_compute_the_same_as_separate_ones() -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(32, size, bias=bias) for size, bias in [(24, True), (8, False), (40, True)]]
    merged = MergedLinear(linears)
    parts = [MergedPart(merged, index) for index in range(3)]
    one, other = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    # Also if parts get different tensors, are called out of order, or not all are called.
    for inputs in ([one, one, one], [one, other, one], [other, one, one]):
        for order in ([0, 1, 2], [2, 0, 1], [1], [0, 0, 1]):
            for index in order:
                expected = linears[index](inputs[index])
                assert torch.allclose(parts[index](inputs[index]), expected, atol=1e-5)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "gemma3_text", "gemma3n_text", "mixtral", "deepseek_v3", "gpt2", "gpt_oss"]
)
def test_a_packed_model_generates_the_same_tokens(kind: str) -> None:
    model = tiny(kind, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prompts = [[5, 6, 7, 5, 6, 7, 8, 9, 10, 11, 12], [3, 4]]
    plain, packed = Target(model), Target(model, accelerate="auto")
    for proposer in (None, NGramProposer(length=4)):
        answers = [generate(target, prompts, proposer, max_new_tokens=20) for target in (plain, packed)]
        assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert plain.model is model and model.config._attn_implementation in ("sdpa", "eager")


def test_dense_weights_are_freed_and_tied_embeddings_kept() -> None:
    model = tiny("llama", dtype=torch.float32, tie_word_embeddings=True)
    accelerate(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert [name for name, _ in model.named_parameters() if "norm" not in name] == ["model.embed_tokens.weight"]


def test_a_copy_shares_its_tensors() -> None:
    model = tiny("llama", dtype=torch.float32)
    copy = accelerated_copy(model, "auto")
    assert copy.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert isinstance(copy.lm_head, PackedLinear) and type(model.lm_head) is nn.Linear


def test_what_is_packed_is_not_packed_again() -> None:
    model = accelerate(tiny("llama", dtype=torch.float32))
    assert accelerated_copy(model, "auto") is model is accelerate(model)
    target = Target(model, accelerate="auto")
    proposer = MedusaProposer(make_head("medusa", target)).prepare(target)
    packed = proposer.head
    assert proposer.prepare(target).head is packed


def test_what_cannot_be_packed_is_left_alone() -> None:
    assert not can_pack(nn.Linear(4, 4, dtype=torch.float64))
    assert not can_pack(nn.Linear(4, 4, device="meta"))
    assert not can_pack(nn.Embedding(4, 4))
    model = accelerate(tiny("llama"))
    assert type(model.lm_head) is nn.Linear


def test_a_padding_mask_still_works_on_a_packed_model() -> None:
    """A call of the model with transformers' ordinary 2-D mask returns the stock model's logits."""
    model = tiny("llama", dtype=torch.float32)
    ids = torch.tensor([[0, 0, 5, 6], [3, 4, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    stock = model(ids, attention_mask=mask).logits[:, 2:]
    packed = accelerated_copy(model, "auto")(ids, attention_mask=mask).logits[:, 2:]
    assert torch.allclose(stock, packed, atol=1e-5)


def test_attention_of_large_batches_in_bfloat16_needs_no_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(LARGE, 6, 1, 8, generator=generator)
    key, value = (torch.randn(LARGE, 2, 64, 8, generator=generator) for _ in "kv")
    mask = torch.zeros(LARGE, 1, 1, 64).masked_fill_(torch.arange(64) >= 40, torch.finfo(torch.bfloat16).min)
    module = nn.Module()
    exact, _ = grouped_sdpa(module, query.double(), key.double(), value.double(), mask.double())
    parts = [part.bfloat16() for part in (query, key, value, mask)]
    gapped = [torch.cat([part, part], dim=2)[:, :, :64] for part in parts[1:3]]
    fused: list[None] = []
    original = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: fused.append(None) or original(*args, **kwargs),
    )
    for calls, keys in enumerate((parts[1:3], gapped)):
        found, _ = grouped_sdpa(module, parts[0], *keys, parts[3])
        assert len(fused) == calls  # over the keys with gaps only
        assert found.shape == exact.shape and (found - exact).abs().max() < 0.02
