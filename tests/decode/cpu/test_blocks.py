"""Weights in blocks: every form against the values it stands for, in products, looked-up rows and mixed layers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from decode.cpu.native_ops import DIGITS, pack, unpack
from decode.weights.blocks import BLOCKS, FLOAT_BLOCKS, PLAIN, Weight
from tests.support.gguf_files import random_blocks
from tests.support.models import needs_compiler

pytestmark = [needs_compiler, pytest.mark.usefixtures("ops")]
FLOAT = {f"{bits} bits{' and minima' * has_minimum}": form for (bits, has_minimum), form in FLOAT_BLOCKS.items()}
FORMS = {**BLOCKS, **FLOAT, "F32": PLAIN[torch.float32], "F16": PLAIN[torch.float16], "BF16": PLAIN[torch.bfloat16]}
SHORT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *FLOAT)  # their blocks have 32 inputs


def multiply(inputs: Tensor, packed: Tensor, outputs: int) -> Tensor:
    return torch.ops.draftless.packed_linear(inputs, packed, None, outputs)


def assert_close(found: Tensor, inputs: Tensor, values: Tensor, digits: int = DIGITS) -> None:
    """Within the rounding of float32 sums, and within that of inputs to two digits."""
    exact, sizes = inputs.double() @ values.double().T, inputs.double().abs() @ values.double().abs().T
    allowed = 2.0**-24 * (4 + inputs.shape[-1] ** 0.5) * sizes
    if digits == 2:
        largest = inputs.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1).double()
        allowed = allowed + 2.0**-16 * largest @ values.double().abs().T
    assert bool(((found.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", range(6))
def test_products_and_rows_of_a_form(name: str, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(seed % 4 + 1)
    inputs = 256 * draw.randint(1, 4) + (32 if name in SHORT and seed % 2 else 0)
    outputs = draw.choice([1, 63, 64, 65, draw.randint(1, 300)])
    data, values = random_blocks(FORMS[name], outputs, inputs, seed)
    order = torch.randperm(outputs) if seed % 2 else None
    values = values if order is None else values[order]
    weight, digits = Weight(data, FORMS[name], inputs, order), (3, 2, 0)[seed % 3]
    packed = pack(weight, digits=digits)
    assert torch.equal(unpack(packed, torch.arange(outputs)), values)
    few = torch.randint(outputs, (3, 2))
    assert torch.equal(unpack(packed, few), values[few])
    assert torch.equal(unpack(packed, few.int()), values[few])
    if name in BLOCKS:  # of ggml
        assert torch.equal(weight.rows(few.flatten()), values[few.flatten()])
    for rows in (1, draw.randint(2, 6), draw.randint(7, 80)):
        given = torch.randn(rows, inputs)
        assert_close(multiply(given, packed, outputs), given, values, digits)


@pytest.mark.parametrize("digits", [2, 3])
def test_inputs_keep_their_bits(digits: int) -> None:
    """The largest of 32 inputs may round up: a digit that is too large by one would change its sign."""
    one = torch.eye(32, dtype=torch.int8).view(torch.uint8)
    scales = torch.ones(32, 1).view(torch.uint8)
    packed = pack(Weight(torch.cat([scales, one], dim=1), FLOAT_BLOCKS[8, False], 32), digits=digits)
    torch.manual_seed(0)
    for _ in range(8):
        given = torch.randn(1 << 17, 32) * torch.exp2(torch.randint(-60, 60, (1 << 17, 1)))
        error = (multiply(given, packed, 32) - given).abs() / given.abs().amax(1, keepdim=True)
        assert float(error.max()) <= (2.0**-15.9 if digits == 2 else 2.0**-22)


@pytest.mark.parametrize("digits", [2, 3, 0])
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q8_0"])
def test_inputs_that_are_no_numbers_stay_in_their_row(name: str, digits: int) -> None:
    data, _ = random_blocks(FORMS[name], 70, 256)
    packed, given = pack(Weight(data, FORMS[name], 256), digits=digits), torch.randn(4, 256)
    clean = multiply(given, packed, 70)
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoilt = given.clone()
        spoilt[1, 77] = bad
        found = multiply(spoilt, packed, 70)
        assert not found[1].isfinite().any()
        assert torch.equal(found[[0, 2, 3]], clean[[0, 2, 3]])
    for tiny in (0.0, 1e-45, 1e-38):
        assert bool((multiply(torch.full((1, 256), tiny), packed, 70).abs() <= 1e-30).all())


@pytest.mark.parametrize(
    ("name", "digits"), [(name, DIGITS) for name in FORMS] + [("Q4_1", 2), ("Q6_K", 2), ("Q4_K", 0)]
)
def test_a_row_does_not_depend_on_others_or_on_threads_or_alignment(name: str, digits: int) -> None:
    data, values = random_blocks(FORMS[name], 200, 512)
    packed, given = pack(Weight(data, FORMS[name], 512), digits=digits), torch.randn(70, 512)
    moved = torch.cat([packed.new_zeros(3), packed])[3:]
    expected = multiply(given, packed, 200)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (1, 2, 5, 6, 7, 13, 25, 64):
            assert torch.equal(multiply(given[:rows], packed, 200), expected[:rows])
        assert torch.equal(multiply(given, moved, 200), expected)
    assert_close(expected, given, values, digits)


def test_a_layer_of_several_forms() -> None:
    """Each weight keeps its form; outputs and rows follow each other."""
    names = ("Q4_K", "Q6_K", "F32", "Q5_0", "Q8_0", "BF16", *FLOAT)
    parts = [random_blocks(FORMS[name], 30 + 7 * number, 256, number) for number, name in enumerate(names)]
    packed = pack(*(Weight(data, FORMS[name], 256) for name, (data, _) in zip(names, parts, strict=True)))
    values, given = torch.cat([values for _, values in parts]), torch.randn(9, 256)
    assert torch.equal(unpack(packed, torch.arange(len(values))), values)
    assert_close(multiply(given, packed, len(values)), given, values)


def test_blocks_take_the_memory_of_the_file() -> None:
    for name, form in {**BLOCKS, **FLOAT}.items():
        data, _ = random_blocks(form, 640, 1024)
        assert pack(Weight(data, form, 1024)).nbytes <= 1.03 * data.nbytes + 64, name


def test_faults_are_errors() -> None:
    data, _ = random_blocks(BLOCKS["Q4_K"], 64, 256)
    packed = pack(Weight(data, BLOCKS["Q4_K"], 256))
    for rows in (torch.tensor([64]), torch.tensor([-1])):
        with pytest.raises(RuntimeError, match=r"row -?\d+ of 64"):
            unpack(packed, rows)
    with pytest.raises(RuntimeError, match="the 256 columns of the packed weight, and outputs its 64"):
        multiply(torch.randn(2, 255), packed, 64)
    with pytest.raises(RuntimeError, match="cannot be packed"):
        pack(Weight(data, 10, 256))
    with pytest.raises(RuntimeError, match="cannot be packed, or not for inputs of this dtype"):
        multiply(torch.randn(2, 256).bfloat16(), packed, 64)
