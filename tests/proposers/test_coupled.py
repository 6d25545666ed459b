"""Coupled drafts: with the target's own noise, a draft finds the tokens that the target will draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from decode import Sampling, Target, generate
from decode.trees.noise import TEXT, gumbel_max, row_keys
from proposers import DraftProposer
from proposers.search import add_noise

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9, 10], [3]]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.7, "top_k": 9},
    {"temperature": 1.0, "min_p": 0.05, "processors": [RepetitionPenaltyLogitsProcessor(1.4)]},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "top-p", "top-k", "processed"])
def test_a_draft_with_the_targets_probabilities_is_always_right(target: Target, settings: dict[str, Any]) -> None:
    """Without the noise, a chain of most likely tokens would end after the first token that was not."""
    sampling = Sampling(**settings, seed=4)
    answers = generate(target, PROMPTS, DraftProposer(target, depth=3, nodes=4), sampling=sampling, max_new_tokens=20)
    for answer in answers:
        assert answer.stats.accepted_by_depth == [5, 5, 4]  # 1 + 5 x 4 tokens, the last draft is cut
    assert [answer.tokens for answer in answers] == [
        answer.tokens for answer in generate(target, PROMPTS, None, sampling=sampling, max_new_tokens=20)
    ]


@pytest.mark.parametrize("settings", SETTINGS[:3], ids=["plain", "top-p", "top-k"])
@pytest.mark.parametrize("token_map", [None, torch.arange(3, 96, 2)], ids=["all tokens", "some tokens"])
def test_the_first_choice_is_what_the_target_draws_from_the_same_probabilities(
    settings: dict[str, Any], token_map: torch.Tensor | None
) -> None:
    """In each row and level, and for each path; draft ids have the noise of the target's tokens."""
    sampling, size = Sampling(**settings, seed=9), 96 if token_map is None else len(token_map)
    keys = row_keys(9, [4, 7], [11, 30], 5, TEXT)
    tokens = torch.arange(96) if token_map is None else token_map
    logits = 2 * torch.randn(2, 6, size, generator=torch.Generator().manual_seed(1))
    for level in range(5):
        perturbed = add_noise(logits, [sampling] * 2, keys[:, level], token_map)
        for path in range(6):
            p = sampling.probabilities(logits[:, path])
            drawn = gumbel_max(p, keys[:, level], tokens)
            assert perturbed[:, path].argmax(dim=1).tolist() == drawn.tolist()


def test_a_low_temperature_leaves_the_logits_as_they_are() -> None:
    """So that the calibration of greedy drafts holds on."""
    logits = torch.randn(1, 2, 50)
    perturbed = add_noise(logits, [Sampling(temperature=1e-6, seed=1)], torch.tensor([5]), None)
    assert torch.allclose(perturbed, logits, atol=1e-3)
