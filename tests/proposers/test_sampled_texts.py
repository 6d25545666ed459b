"""Text with sampled drafts of heads: its distribution, what it depends on, and sampling without replacement."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TopKLogitsWarper

from decode import Sampling, Target, Tree, generate
from decode.models.cost_curve import CostCurve
from decode.noise import stream_uniforms
from proposers import HEAD_PROPOSERS
from proposers.trees.sampled import sample_without_replacement
from proposers.trees.search import keep_order
from tests.decode.test_lossless import texts
from tests.proposers.test_sampled_heads import EAGLES, make
from tests.support.drafting import Recorder, fix_cost
from tests.support.models import tiny

WORDS = 12
BATCHES = [  # kind, settings of the proposer and of its head, batch size, runs
    ("eagle", {"width": 1, "nodes": 4}, {"draft_size": 9}, 1, 90),
    ("eagle", {"nodes": 12}, {}, 3, 150),
    ("eagle", {}, {"draft_size": 9}, 30, 300),
    ("eagle3", {"depth": 3, "width": 4, "nodes": 10}, {"draft_size": 9}, 1, 90),
    ("eagle3", {"width": 1, "nodes": 4}, {}, 3, 150),
    ("eagle3", {"depth": 3, "nodes": 8}, {"draft_size": 9}, 30, 300),
    ("hydra", {"nodes": 8}, {"draft_size": 9}, 30, 300),
    ("medusa", {"nodes": 8}, {}, 30, 300),
]


@pytest.fixture(scope="module")
def words() -> Target:
    return Target(tiny("llama", vocab_size=WORDS))


def third_token(target: Target, prompt: list[int], sampling: Sampling) -> Tensor:
    """The probabilities [V] of plain sampling's third token."""
    pairs = [[*prompt, one, two] for one in range(WORDS) for two in range(WORDS)]

    def probabilities(texts: list[list[int]]) -> Tensor:
        logits, _ = target.open(len(texts)).extend(texts)
        return sampling.probabilities(logits, [torch.tensor(text) for text in texts], list(range(len(texts))))

    first, third = probabilities([prompt]), probabilities(pairs)
    second = probabilities([[*prompt, one] for one in range(WORDS)])
    return (first.T * second).flatten() @ third


@pytest.mark.parametrize(("kind", "settings", "head", "batch_size", "runs"), BATCHES)
def test_text_has_the_distribution_of_plain_sampling(
    monkeypatch: pytest.MonkeyPatch,
    words: Target,
    kind: str,
    settings: dict[str, Any],
    head: dict[str, Any],
    batch_size: int,
    runs: int,
) -> None:
    """Chi-square test of the third token, which lies inside drafts."""
    fix_cost(monkeypatch, words, CostCurve([1, 64], [1.0, 1.0]))
    processors = [TopKLogitsWarper(6)] if kind == "hydra" else []
    sampling = Sampling(temperature=1.5, top_k=8, top_p=0.95, processors=processors, seed=1)
    answers = generate(
        words,
        [[3, 4]] * runs,
        make(kind, words, head, **settings),
        sampling=sampling,
        max_new_tokens=4,
        batch_size=batch_size,
    )
    assert sum(sum(answer.stats.accepted_by_depth) for answer in answers) > runs / 20
    seen = torch.bincount(torch.tensor([answer.tokens[2] for answer in answers]), minlength=WORDS)
    expected = runs * third_token(words, [3, 4], sampling)
    assert not seen[expected == 0].any()
    likely = expected > 4
    seen, expected = (torch.cat([part[likely], part[~likely].sum()[None]]) for part in (seen, expected))
    statistic = float(((seen - expected) ** 2 / expected.clamp(min=1e-9)).sum())
    assert statistic < 31.3  # at most 11 degrees of freedom: one in a thousand


@pytest.mark.parametrize("settings", [{"nodes": 9}, {"width": 1, "nodes": 5}])
@pytest.mark.parametrize("kind", EAGLES)
def test_draft_tokens_depend_on_their_keys_only(words: Target, kind: str, settings: dict[str, Any]) -> None:
    """With equally many nodes in every step, the whole text then does too, in any batch."""
    prompts = [[5, 9, 5], [7], [3, 4, 4, 1]]
    decode = partial(texts, words, prompts=prompts, stop_ids=[2])
    proposer = make(kind, words, {"draft_size": 9}, **settings)
    sampling = Sampling(temperature=1.5, seed=7)
    text = decode(proposer, sampling=sampling)
    for batch_size in (1, 2, 3):
        assert decode(proposer, sampling=sampling, batch_size=batch_size) == text
    assert decode(proposer, sampling=replace(sampling, seed=8)) != text
    assert decode(None, sampling=sampling) != text


@pytest.mark.parametrize("kind", EAGLES)
def test_nothing_is_sampled_at_temperature_0(words: Target, kind: str) -> None:
    proposer = make(kind, words, nodes=9)
    generate(words, [[3]], proposer, sampling=Sampling(temperature=1.0, seed=1), max_new_tokens=8)
    drafts = []
    for drafter in (proposer, make(kind, words, nodes=9, sampled=False)):
        recorder = Recorder(drafter)
        assert texts(words, recorder, [[3, 4], [5]]) == texts(words, None, [[3, 4], [5]])
        assert all(tree.q is None for tree in recorder.trees)
        drafts.append(recorder.drafted)
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("kind", HEAD_PROPOSERS)
def test_trees_carry_the_probabilities_that_they_were_sampled_from(words: Target, kind: str) -> None:
    """Over the target's tokens, and zero outside the draft vocabulary; siblings differ."""
    for settings in ({"nodes": 10}, {"width": 1, "nodes": 4}) if kind in EAGLES else ({"nodes": 10},):
        proposer = make(kind, words, {"draft_size": 7}, **settings)
        recorder = Recorder(proposer)
        generate(words, [[3, 4], [5]], recorder, sampling=Sampling(temperature=1.5, seed=1), max_new_tokens=20)
        drafts = [tree for tree in recorder.trees if tree.width > 1]
        assert drafts
        for tree in drafts:
            is_chain = bool((tree.depth == torch.arange(tree.width)).all())
            assert is_chain == ("width" in settings)
            check_q(tree, set(proposer.head.token_map.tolist()))


def check_q(tree: Tree, known: set[int]) -> None:
    assert tree.q is not None and tree.q.shape == (*tree.tokens.shape, WORDS)
    for row in range(tree.batch):
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        for parent in {*parents[1:]}:
            q = tree.q[row, parent]
            children = [tokens[node] for node in range(1, len(tokens)) if parents[node] == parent]
            assert len({*children}) == len(children) and (q[children] > 0).all()
            assert float(q.sum()) == pytest.approx(1) and {*q.nonzero().flatten().tolist()} <= known


# ---- sampling tokens ----


def test_tokens_are_sampled_without_replacement() -> None:
    rounds, tokens = 20_000, [3, 700, 300, 511]  # in several groups
    q = torch.zeros(1000, dtype=torch.float64)
    q[tokens] = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    uniforms = stream_uniforms(torch.tensor([5]), torch.arange(rounds * 4)).view(rounds, 2, 2)
    sampled = sample_without_replacement(q.expand(rounds, -1), uniforms)
    index = torch.full((1000,), 99)
    index[tokens] = torch.arange(4)
    counts = torch.bincount(index[sampled] @ torch.tensor([4, 1]), minlength=16).view(4, 4)
    small = q[tokens]
    expected = rounds * small[:, None] * small / (1 - small[:, None])
    expected.fill_diagonal_(0)
    assert (counts[expected == 0] == 0).all()
    cells = expected > 0
    assert float(((counts - expected)[cells] ** 2 / expected[cells]).sum()) < 31.3  # 11 degrees of freedom


def test_sampling_more_tokens_than_have_probability() -> None:
    q = torch.tensor([[0.0, 1 - 1e-17, 0.0, 1e-17, 0.0], [0.2] * 5], dtype=torch.float64)
    for noise in (0.0, 0.5, 1 - 2.0**-53):
        sampled = sample_without_replacement(q, torch.full((2, 5, 2), noise, dtype=torch.float64)).tolist()
        assert sampled[0][:2] == [1, 3] and sorted(sampled[1]) == [0, 1, 2, 3, 4]
        assert all(q[0, token] == 0 or token in (1, 3) for token in sampled[0])
    assert q[1].tolist() == [0.2] * 5


def test_a_later_sample_never_scores_higher() -> None:
    reversed_by_calibration = -3 - torch.tensor([[[-0.1, -1.0, -2.0]]])
    assert keep_order(reversed_by_calibration)[0, 0].tolist() == pytest.approx([-2.9] * 3)
