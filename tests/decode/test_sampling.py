"""Probabilities, samples and keyed noise."""

from __future__ import annotations

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from decode import Sampling
from decode.trees.noise import ACCEPTANCE, gumbel_max, inverse_cdf, key, row_keys, stream_uniforms, to_uniforms
from decode.trees.sampling import FastTopP


def uniform(*keys: int) -> float:
    """A number in [0, 1) keyed by all arguments."""
    return float(key(*keys) * 2.0**-53)


def test_noise_depends_on_its_keys_only() -> None:
    keys = [(seed, request_id, position) for seed in range(12) for request_id in range(12) for position in range(12)]
    numbers = [uniform(*key) for key in keys]
    assert numbers == [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(numbers)
    assert uniform(1, 2, 3) != uniform(1, 2, 3, ACCEPTANCE) != uniform(1, 2, 3, ACCEPTANCE, 1)


def test_a_table_of_noise_equals_single_calls() -> None:
    """Exactly: in float32 some would be rounded up to 1."""
    rows = range(7)
    for seed in (*range(50), 1 << 64, (1 << 70) + 3, -1):  # any whole number is a seed
        noise = to_uniforms(row_keys(seed, rows, [5 * row for row in rows], 4, ACCEPTANCE)).tolist()
        assert noise == [[uniform(seed, row, 5 * row, ACCEPTANCE, index) for index in range(4)] for row in rows]
    assert to_uniforms(torch.tensor([2**53 - 1])).item() < 1


def test_noise_is_uniform_and_neighbours_are_independent() -> None:
    numbers = torch.tensor([[uniform(seed, 0, position) for position in range(100)] for seed in range(300)])
    assert abs(numbers.mean() - 0.5) < 0.01 and abs(numbers.var() - 1 / 12) < 0.01
    cells = (numbers[:, :-1] * 8).long() * 8 + (numbers[:, 1:] * 8).long()
    counts = torch.bincount(cells.flatten(), minlength=64).double()
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 110  # 63 degrees of freedom, p = 0.0002


def test_inverse_cdf_draws_each_token_in_its_interval() -> None:
    p = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    for number, token in [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2**-53, 4)]:
        assert inverse_cdf(p * 7, torch.tensor([number], dtype=torch.float64)).item() == token
        assert inverse_cdf(p, torch.tensor([number], dtype=torch.float64)).item() == token
    tiny = torch.tensor([[0.0, 1e-300, 0.0, 0.0]], dtype=torch.float64)
    for number in (0.0, 1 - 2.0**-53, *stream_uniforms(torch.tensor([7]), torch.arange(300))[0].tolist()):
        assert inverse_cdf(tiny, torch.tensor([number], dtype=torch.float64)).item() == 1  # the others weigh nothing


def test_gumbel_max_draws_tokens_by_their_probabilities() -> None:
    p = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.2, 0.05, 0.0]], dtype=torch.float64)
    drawn = gumbel_max(3 * p.expand(20000, -1), torch.tensor([key(1, 2, position) for position in range(20000)]))
    counts, expected = torch.bincount(drawn, minlength=7), 20000 * p[0]
    assert counts[expected == 0].sum() == 0
    assert ((counts - expected) ** 2 / expected)[expected > 0].sum() < 20  # 3 degrees of freedom, p = 0.0002


def test_gumbel_max_ignores_rounding() -> None:
    """With a large vocabulary and errors as in float32. With an inverse CDF some tokens would differ."""
    logits = torch.randn(40, 20000, generator=torch.Generator().manual_seed(1))
    rounded = logits + 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    seeds = torch.arange(40)
    drawn = [gumbel_max(each.double().softmax(dim=1), seeds) for each in (logits, rounded)]
    assert torch.equal(*drawn)


def test_stream_uniforms_are_splitmix64() -> None:
    """The published generator's first outputs for seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    first = stream_uniforms(torch.tensor([1234567, 9]), torch.arange(3))
    assert first[0].tolist() == [(number >> 11) * 2.0**-53 for number in expected]
    numbers = stream_uniforms(torch.arange(100), torch.arange(100)).flatten()
    assert len(numbers.unique()) == 10_000 and 0 <= float(numbers.min()) <= float(numbers.max()) < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.015


def test_probabilities_are_those_of_transformers_warpers() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    assert Sampling().probabilities(logits).tolist() == [[1, 0, 0, 0]]
    assert torch.allclose(Sampling(temperature=2.0).probabilities(logits), (logits.double() / 2).softmax(-1))
    for settings in ({"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.3}):
        kept = Sampling(temperature=1, **settings).probabilities(logits) > 0
        assert kept.tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_fast_top_p_equals_transformers(top_p: float) -> None:
    """Few tokens suffice, most are needed, or others were excluded before."""
    logits = torch.randn(60, 3000, generator=torch.Generator().manual_seed(1)).double()
    logits *= torch.linspace(0.01, 8, 60)[:, None]
    tied = logits.bfloat16().float()  # as from a model in bfloat16
    for scores in (logits, TopKLogitsWarper(40)(None, logits), logits[:1], logits[-1:], tied):
        together = FastTopP(top_p)(None, scores)
        assert torch.equal(together, TopPLogitsWarper(top_p)(None, scores))
        assert torch.equal(together, torch.cat([FastTopP(top_p)(None, row) for row in scores.split(1)]))


@pytest.mark.parametrize("settings", [{"temperature": 1e-30}, {"top_p": 1e-12}, {"min_p": 1.0}, {"top_k": 1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_leaves_one_token_is_greedy(settings: dict[str, float], dtype: torch.dtype) -> None:
    logits = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = Sampling(**{"temperature": 1.0, **settings}).probabilities(logits)
    assert torch.equal(found, Sampling().probabilities(logits))
