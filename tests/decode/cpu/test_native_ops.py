"""The C++ ops against float64, for random shapes, and packed layers where they cannot be compiled."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from decode import Target
from decode.cpu.native_ops import load_native_ops, pack, passing_flat
from decode.cpu.packed_linear import OneDnnLinear, PackedLinear
from decode.devices.backend import find_backend, top_tokens
from decode.trees.accept import choose_greedily
from decode.trees.sampling import NO_TOKEN
from decode.weights.blocks import Weight
from tests.decode.cpu.test_packed import use_onednn
from tests.support.models import needs_compiler, tiny

pytestmark = [needs_compiler, pytest.mark.usefixtures("ops")]
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # the largest relative error of rounding
DTYPES = [*EPSILON]


def unaligned(tensor: Tensor) -> Tensor:
    """The same numbers, at an odd offset in memory."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def strided(tensor: Tensor) -> Tensor:
    """The same numbers, with gaps between them in the last dimension."""
    return torch.stack([tensor, torch.full_like(tensor, 99.0)], dim=-1)[..., 0]


FORMS: list[Callable[[Tensor], Tensor]] = [lambda tensor: tensor, unaligned, strided]


def make_layer(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> tuple[nn.Linear, PackedLinear]:
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    return linear, PackedLinear(linear)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_attention_takes_the_nodes_of_all_rows_as_one_row(dtype: torch.dtype, seed: int) -> None:
    """They get the same bits as in rows of their own. Queries of another number are no flat pass, nor later ones."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    rows, nodes, heads = draw.randint(2, 5), draw.choice([draw.randint(1, 14), 60]), draw.choice([2, 6])
    counts = torch.randint(0, nodes + 1, (rows,))
    counts[0] = nodes
    real = torch.arange(nodes) < counts[:, None]
    query = torch.randn(rows, heads, nodes, 16).to(dtype)
    keys, values = (torch.randn(rows, 2, 300, 16).to(dtype) for _ in range(2))
    mask = torch.zeros(rows, 1, nodes, 300, dtype=dtype).masked_fill_(
        torch.rand(rows, 1, nodes, 300) < 0.5, torch.finfo(dtype).min
    )
    attend = torch.ops.draftless.tree_attention
    expected = attend(query, keys, values, mask, 0.25)
    flat_query, flat_mask = query.transpose(1, 2)[real].transpose(0, 1)[None], mask[:, 0][real][None, None]
    with passing_flat(counts):
        assert torch.equal(attend(flat_query, keys, values, flat_mask, 0.25)[0], expected[real])
        assert torch.equal(attend(query, keys, values, mask, 0.25), expected)
    assert torch.equal(attend(query[:1], keys[:1], values[:1], mask[:1], 0.25), expected[:1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_hides_no_fault(dtype: torch.dtype) -> None:
    """NaN in a query, or in a key or value that is seen, is NaN in its results; a node that sees nothing gets zeros."""
    for fault in range(3):
        query, keys, values = torch.ones(1, 2, 3, 16), torch.ones(1, 2, 300, 16), torch.ones(1, 2, 300, 16)
        mask = torch.zeros(1, 1, 3, 300)
        mask[..., 1, :] = torch.finfo(dtype).min
        (query[:, :, 0], keys[:, :, 5], values[:, :, 5])[fault].fill_(torch.nan)
        given = [each.to(dtype) for each in (query, keys, values, mask)]
        found = torch.ops.draftless.tree_attention(*given, 0.25)[0]  # [N, heads, D]
        assert found[0].isnan().all() and (fault or found[2].isfinite().all())
        alone = torch.ops.draftless.tree_attention(given[0][:, :, 1:2], *given[1:3], given[3][:, :, 1:2], 0.25)
        assert not alone.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_that_no_node_sees_are_left_out(dtype: torch.dtype) -> None:
    """They change no bit, and NaN in them does no harm."""
    torch.manual_seed(0)
    query, seen = torch.randn(1, 6, 9, 16).to(dtype), torch.zeros(900, dtype=torch.bool)
    seen[70:75] = seen[300:301] = seen[560:700] = True
    keys, values = (torch.randn(1, 2, 900, 16).to(dtype) for _ in range(2))
    mask = torch.where(torch.rand(1, 1, 9, 900) < 0.5, 0.0, torch.finfo(dtype).min).to(dtype)
    mask[..., ~seen] = torch.finfo(dtype).min
    mask[..., 300] = 0
    expected = torch.ops.draftless.tree_attention(query, keys, values, mask, 0.25)
    for states in (keys, values):
        states[:, :, 768:] = torch.nan  # a part of 256 slots
    assert torch.equal(torch.ops.draftless.tree_attention(query, keys, values, mask, 0.25), expected)
    first = [each[:, :, :768] for each in (keys, values)]
    assert torch.equal(torch.ops.draftless.tree_attention(query, *first, mask[..., :768], 0.25), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(40))
def test_linear_layers_of_random_shapes(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    size = draw.choice([1, 2, 3, 63, 129, draw.randint(1, 700)])
    outputs = draw.choice([1, 64, 65, draw.randint(1, 300)])
    torch.set_num_threads(seed % 4 + 1)
    linear, packed = make_layer(size, outputs, draw.random() < 0.5, dtype)
    assert torch.equal(packed.dense_weight(), linear.weight)
    for shape in ((draw.randint(1, 80),), (draw.randint(1, 5), draw.randint(1, 16)), (), (0,), (0, 4), (3, 0)):
        inputs = draw.choice(FORMS)(torch.randn(*shape, size).to(dtype))
        weight, bias = linear.weight.double(), torch.zeros(outputs) if linear.bias is None else linear.bias.double()
        exact, sizes = inputs.double() @ weight.T + bias, inputs.double().abs() @ weight.T.abs() + bias.abs()
        found = packed(inputs)
        assert found.shape == exact.shape and found.dtype == dtype
        allowed = 4 * EPSILON[torch.float32] * (2 + size**0.5) * sizes + 1.01 * EPSILON[dtype] * exact.abs()
        assert bool(((found.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_number_of_rows_or_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    _, packed = make_layer(333, 150, True, dtype)
    inputs = torch.randn(80, 333).to(dtype)
    expected = packed(inputs)
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        for rows in range(1, 80):
            assert torch.equal(packed(inputs[:rows]), expected[:rows])
            assert torch.equal(packed(inputs[rows]), expected[rows])


def make_halved(inputs: int, outputs: int) -> tuple[nn.Linear, PackedLinear]:
    """A float32 layer whose weights bfloat16 holds exactly."""
    linear = nn.Linear(inputs, outputs)
    linear.weight.data = linear.weight.detach().bfloat16().float()
    return linear, PackedLinear(linear)


@pytest.mark.parametrize("inputs", [2, 64, 130, 576])
def test_weights_that_bfloat16_holds_take_half_the_memory_and_give_the_same_bits(inputs: int) -> None:
    torch.manual_seed(0)
    linear, halved = make_halved(inputs, 150)
    full = PackedLinear(linear)
    full.packed = nn.Buffer(pack(Weight.dense(linear.weight.detach())))
    assert halved.packed.nbytes < 0.51 * full.packed.nbytes + 64
    assert torch.equal(halved.dense_weight(), linear.weight) and torch.equal(full.dense_weight(), linear.weight)
    for rows in (1, 5, 6, 7, 24, 25, 60):
        states = torch.randn(rows, inputs)
        assert torch.equal(halved(states), full(states))


def test_an_odd_number_of_inputs_is_not_read_in_pairs() -> None:
    """As a file may store them in bfloat16. NaN in a row stays there."""
    stored, inputs = Weight.dense(torch.randn(20, 33).bfloat16()), torch.randn(5, 33)
    inputs[3, 0] = torch.nan
    found = torch.ops.draftless.packed_linear(inputs, pack(stored), None, 20)
    assert torch.allclose(found, nn.functional.linear(inputs, stored.rows()), atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_halved_weights_in_another_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear, halved = make_halved(34, 20)
    inputs = torch.randn(3, 34).to(dtype)
    assert torch.allclose(halved.to(dtype)(inputs), linear.to(dtype)(inputs), rtol=0.02, atol=0.01)
    assert torch.equal(halved.dense_weight(), linear.weight)
    with pytest.raises(RuntimeError):
        halved(inputs.float())


def test_inputs_that_the_linear_op_cannot_take_are_errors() -> None:
    _, packed = make_layer(8, 5, False, torch.float32)
    faults = {
        torch.ones(1, 7): "inputs must have the 8 columns of the packed weight",
        torch.ones(1, 9): "inputs must have the 8 columns of the packed weight",
        torch.ones(1, 8).bfloat16(): "form 0 cannot be packed, or not for inputs of this dtype",
        torch.ones(1, 8).double(): "inputs must be in float32 or bfloat16",
    }
    for inputs, message in faults.items():
        with pytest.raises(RuntimeError):
            packed(inputs)
        with pytest.raises(RuntimeError, match=message):
            torch.ops.draftless.packed_linear(inputs, packed.packed, None, 5)
    with pytest.raises(RuntimeError, match="and outputs its 5"):
        torch.ops.draftless.packed_linear(torch.ones(1, 8), packed.packed, None, 6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_the_dense_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear, packed = make_layer(33, 20, True, dtype)
    gradients = []
    for layer in (linear, packed):
        inputs = torch.linspace(-1, 1, 99).view(3, 33).to(dtype).requires_grad_()
        layer(inputs).square().sum().backward()
        gradients.append(inputs.grad)
    assert gradients[0].abs().max() > 0.1
    assert torch.allclose(*gradients, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_under_autocast_compute_what_dense_ones_do(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear, packed = make_layer(32, 20, True, dtype)
    for inputs in (torch.randn(3, 32), torch.randn(3, 32).bfloat16()):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.allclose(packed(inputs).float(), linear(inputs).float(), atol=0.02)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax attention in float64, as the op returns it."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scale + mask.double()
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


def draw_mask(rows: int, nodes: int, slots: int, dtype: torch.dtype) -> Tensor:
    """A mask like a tree's: a ragged row of committed slots, some nodes after it; each node sees something."""
    slot, lengths = torch.arange(slots), torch.randint(slots, (rows, 1, 1, 1))
    committed, in_tree = slot < lengths, (slot >= lengths) & (slot < lengths + nodes)
    seen = committed | (in_tree & (torch.rand(rows, 1, nodes, slots) < 0.5))
    seen |= slot == torch.minimum(lengths + torch.arange(nodes)[:, None], torch.tensor(slots - 1))  # itself
    return torch.zeros(rows, 1, nodes, slots, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda states: torch.cat([states, torch.full_like(states, torch.nan)], dim=2)[:, :, : states.shape[2]],  # a cache
    lambda states: states.transpose(1, 2).contiguous().transpose(1, 2),  # slots far apart
    *FORMS,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(60))
def test_attention_of_random_shapes(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    torch.set_num_threads(seed % 4 + 1)
    rows, heads, groups, nodes = (draw.randint(1, most) for most in (4, 3, 5, draw.choice([20, 90])))
    slots, size = draw.choice([1, 17, 64, 128, draw.randint(1, 700)]), draw.choice([1, 8, 64, draw.randint(1, 130)])
    value_size = draw.choice([size, 64, draw.randint(1, 130)])
    mask = draw_mask(draw.choice([rows, 1]), nodes, slots, dtype)
    shapes = (rows, heads * groups, nodes, size), (rows, heads, slots, size), (rows, heads, slots, value_size)
    query, key, value = (torch.randn(shape).to(dtype) for shape in shapes)
    exact = attend(query, key, value, mask, size**-0.5)
    query, key, value = draw.choice(FORMS)(query), draw.choice(LAYOUTS)(key), draw.choice(LAYOUTS)(value)
    found = torch.ops.draftless.tree_attention(query, key, value, mask, size**-0.5)
    assert found.shape == exact.shape and found.dtype == dtype and found.is_contiguous()
    errors = (found.double() - exact).abs()
    assert bool((errors <= 1e-5 + 1.01 * EPSILON[dtype] * exact.abs()).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("magnitude", [1e4, 1e20, 1e36])
def test_attention_to_large_scores(dtype: torch.dtype, sign: int, magnitude: float) -> None:
    """The largest score that a node sees takes all."""
    torch.manual_seed(0)
    slots, nodes = 300, 5
    mask = draw_mask(2, nodes, slots, dtype)
    steps = torch.arange(slots)[torch.randperm(slots)] + 1.0  # [slots]: exact in bfloat16 up to 256
    steps = steps.bfloat16().float()
    query = torch.full((2, 4, nodes, 8), sign * magnitude**0.5, dtype=dtype)
    key = (steps[:, None] * magnitude**0.5 / 8 / slots).expand(2, 2, slots, 8).to(dtype)
    value = torch.randn(2, 2, slots, 8).to(dtype)
    exact = attend(query, key, value, mask, 1.0)
    found = torch.ops.draftless.tree_attention(query, key, value, mask, 1.0)
    assert bool(torch.isfinite(found).all()) and torch.allclose(found.double(), exact, atol=0.01)


EMPTY = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n'  # a compiler that writes an empty library
# Compilers, by name or as a shell script, and why the ops cannot be compiled, loaded or kept.
FAILURES: dict[str, tuple[str, str]] = {
    "no compiler": ("/nonexistent", "No such file or directory: '/nonexistent'"),
    "it fails": ("false", "the compiler failed"),
    "its errors are not UTF-8": ("#!/bin/sh\nprintf '\\377 an error: strange\\n' >&2; exit 1\n", "an error: strange"),
    "it writes no library": ("true", "No such file or directory"),
    "it writes an empty library": (EMPTY, "Could not load this library"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_without_the_ops_onednn_packs_layers(
    failure: str, kernel_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, reason = FAILURES[failure]
    if "\n" in compiler:
        (tmp_path / "script").write_text(compiler)
        (tmp_path / "script").chmod(0o700)
        compiler = str(tmp_path / "script")
    monkeypatch.setenv("CXX", compiler)
    found = load_native_ops.__wrapped__()  # not the ops that this process has loaded
    assert found is not None and reason in found and "\n" not in found
    use_onednn(monkeypatch, found)
    monkeypatch.setattr(torch.ops, "draftless", None)  # it would be missing
    model, ids = tiny("llama", dtype=torch.float32), torch.tensor([[5, 6, 7]])
    refusal = f"kernels cannot be compiled here ({found}); they need a C++ compiler such as g++"
    with pytest.raises(ValueError, match=f"^{re.escape(refusal)}"):
        Target(model, accelerate="compiled")
    packed = Target(model, accelerate="auto").model
    assert type(packed.lm_head) is OneDnnLinear and type(model.lm_head) is nn.Linear
    assert torch.allclose(packed(ids).logits, model(ids).logits, atol=1e-4)


@pytest.mark.parametrize("own", [True, False])
def test_the_most_likely_tokens(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_native_ops() is None
    if not own:
        monkeypatch.setattr(find_backend(torch.device("cpu")), "top_tokens", None)
    for seed, size in enumerate((1, 7, 255, 256, 257, 1000, 4099)):
        logits = 9 * torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed))
        expected = logits.double().topk(min(8, size), dim=-1)
        ids, values = top_tokens(logits, 8, normalized=False)
        assert torch.equal(ids, expected.indices) and torch.equal(values.double(), expected.values)
        ids, log_p = top_tokens(logits, 8)
        assert torch.equal(ids, expected.indices)
        torch.testing.assert_close(log_p, logits.double().log_softmax(dim=-1).gather(-1, ids).float())
        assert torch.equal(choose_greedily(logits), logits.argmax(dim=-1))


def test_of_equal_logits_the_first_is_chosen_and_none_next_to_nan() -> None:
    assert load_native_ops() is None
    logits = torch.zeros(5, 1000)
    logits[1, [300, 700]] = 1.0
    logits[2], logits[3, 999], logits[4, 5] = -torch.inf, torch.nan, torch.inf
    assert choose_greedily(logits).tolist() == [0, 300, NO_TOKEN, NO_TOKEN, NO_TOKEN]
    assert choose_greedily(logits.double()).tolist() == [0, 300, NO_TOKEN, NO_TOKEN, NO_TOKEN]
    with pytest.raises(RuntimeError, match="the best 0 of 1000"):
        torch.ops.draftless.top_tokens(logits, 0, False)
