"""`speculate` inside transformers' own `generate`: the same tokens, with all settings."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria, WatermarkingConfig

from decode import PlainProposer, Proposer, Target, Tree
from proposers import DraftProposer, NGramProposer
from tests.decode.hf.test_custom_generate_outputs import assert_same
from tests.support.models import CONTEXT, VOCABULARY, tiny
from tests.support.speculating import BATCH, MAKERS, MASK, NEW, PROMPT, generate


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> Tensor:
    """transformers' own tokens for the batch, [3, 7 + NEW]."""
    return model.generate(BATCH, attention_mask=MASK, max_new_tokens=NEW)


@pytest.fixture(scope="module", params=["none", "ngram", "draft tree", "itself"])
def proposer(request: pytest.FixtureRequest, model: PreTrainedModel) -> Proposer:
    """Deterministic drafts."""
    return MAKERS[request.param](Target(model))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "mistral window"])
def test_greedy_tokens_are_those_of_generate(kind: str) -> None:
    model = tiny(kind)
    for ids in (PROMPT, torch.cat([BATCH, BATCH[1:2].expand(3, -1)], dim=1), PROMPT[:, :1]):
        for proposer in (None, NGramProposer(length=5), DraftProposer(Target(model), width=2, depth=3, nodes=7)):
            assert_same(model, proposer, ids)


def test_it_ends_at_the_context_length(model: PreTrainedModel) -> None:
    assert generate(model, torch.full((1, CONTEXT - 5), 7), NGramProposer()).shape == (1, CONTEXT)


# Settings and logits processors


class Shift(LogitsProcessor):
    """Depends on the length, on the first token (padding) and on the last."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        weight = (input_ids[:, :1] + 3 * input_ids[:, -1:] + input_ids.shape[1]) % 7
        return scores + weight * torch.sin(torch.arange(scores.shape[-1]) * weight)


def allow(row: int, tokens: Tensor) -> list[int]:
    """Each row of the batch allows other tokens. It fails for a prefix with tokens that were not allowed."""
    new = tokens.tolist()[BATCH.shape[1] :]
    assert all(token % 5 == (place + row) % 5 for place, token in enumerate(new))
    return [token for token in range(VOCABULARY) if token % 5 == (len(new) + row) % 5]


ENDS = [11, 40, 57]
SETTINGS: dict[str, dict[str, Any]] = {
    "an end": {"eos_token_id": 11},
    "ends": {"eos_token_id": ENDS},
    "ends in a tensor": {"eos_token_id": torch.tensor([*ENDS, 88, 24])},
    "ends and padding": {"eos_token_id": ENDS, "pad_token_id": 3},
    "the length with padding": {"max_new_tokens": None, "max_length": 19},
    "one token": {"max_new_tokens": 1},
    "a config": {"generation_config": GenerationConfig(eos_token_id=11, pad_token_id=0)},
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition in the prompt": {"encoder_repetition_penalty": 1.5},
    "n-grams of the prompt": {"encoder_no_repeat_ngram_size": 1},
    "least tokens": {"min_new_tokens": 6, "eos_token_id": list(range(3, 30))},
    "forced end": {"forced_eos_token_id": 55, "eos_token_id": 55},
    "allowed": {"prefix_allowed_tokens_fn": allow},
    "watermark": {"watermarking_config": WatermarkingConfig()},
    "own": {"logits_processor": [Shift()]},
    "many": {"logits_processor": [Shift()], "repetition_penalty": 1.5, "min_new_tokens": 6, "eos_token_id": [3, 4, 5]},
}


@pytest.mark.parametrize("name", [*SETTINGS, *PROCESSORS])
def test_settings_have_the_same_effect_as_in_transformers(
    model: PreTrainedModel, plain: Tensor, proposer: Proposer, name: str
) -> None:
    if name in SETTINGS:
        for ids in (BATCH, BATCH[1:2]):
            assert_same(model, proposer, ids, **SETTINGS[name])
    else:
        got = assert_same(model, proposer, BATCH, **PROCESSORS[name])
        assert got.sequences.tolist() != plain.tolist()


def test_allowed_tokens_with_sampled_drafts(model: PreTrainedModel) -> None:
    draft = DraftProposer(Target(tiny("llama", num_hidden_layers=1)), sampled=True, depth=4, nodes=5)
    assert_same(model, draft, BATCH, prefix_allowed_tokens_fn=allow)
    got = generate(model, BATCH, draft, attention_mask=MASK, prefix_allowed_tokens_fn=allow, do_sample=True)
    for row, tokens in enumerate(got):
        allow(row, tokens)
    copies = {"do_sample": True, "num_return_sequences": 2}
    got = generate(model, BATCH, draft, attention_mask=MASK, prefix_allowed_tokens_fn=allow, **copies)
    for row, tokens in enumerate(got):
        allow(row // 2, tokens)


def test_processors_see_prefixes_of_the_text_only(model: PreTrainedModel, proposer: Proposer) -> None:
    """No rejected draft tokens, and nothing after the end of a row: a grammar may fail there."""
    asked: list[list[int]] = []

    class Watch(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            asked.extend(input_ids.tolist())
            return scores

    ends = model.generate(BATCH, attention_mask=MASK, max_new_tokens=NEW)[:2, -4].tolist()
    settings = {"attention_mask": MASK, "eos_token_id": ends, "pad_token_id": 0, "logits_processor": [Watch()]}
    for tokens, start in zip(generate(model, BATCH, proposer, **settings).tolist(), BATCH.tolist(), strict=True):
        new = tokens[len(start) :]
        stop = min((new.index(end) for end in ends if end in new), default=NEW - 1)
        for size in range(stop + 1):
            asked.remove(start + new[:size])
    assert asked == []


# Stopping criteria


class SumReached(StoppingCriteria):
    """Ends a row by the sum of its tokens, padding included. Records its inputs, those of copies too."""

    def __init__(self, remainder: int) -> None:
        self.remainder = remainder
        self.seen: list[list[int]] = []
        self.note = self.seen.extend  # not copied

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.note(input_ids.tolist())
        return (input_ids.sum(dim=1) + input_ids.shape[1]) % 11 == self.remainder


@pytest.mark.parametrize("remainder", range(4))
def test_criteria_see_each_prefix_of_each_row_once(model: PreTrainedModel, proposer: Proposer, remainder: int) -> None:
    for ids in (PROMPT, BATCH):
        theirs, ours, mask = SumReached(remainder), SumReached(remainder), (ids != 0).long()
        got = generate(model, ids, proposer, attention_mask=mask, stopping_criteria=[ours]).tolist()
        for row, tokens in enumerate(got):
            one = {"attention_mask": mask[row : row + 1], "max_new_tokens": NEW, "stopping_criteria": [theirs]}
            alone = model.generate(ids[row : row + 1], **one)[0].tolist()
            assert tokens[: len(alone)] == alone
        assert sorted(ours.seen) == sorted(theirs.seen)


# Streamers and results


def test_a_streamer_gets_every_step_once(model: PreTrainedModel, proposer: Proposer) -> None:
    streamer = Mock()
    got = generate(model, PROMPT, proposer, streamer=streamer)
    steps = [call.args[0].flatten().tolist() for call in streamer.put.call_args_list]
    assert [token for step in steps for token in step] == got[0].tolist() and streamer.end.call_count == 1
    assert steps[0] == PROMPT[0].tolist()
    assert len(steps) == 1 + NEW or not isinstance(proposer, PlainProposer)


# Sampling


def test_torch_seed_reproduces(model: PreTrainedModel) -> None:
    settings = {"do_sample": True, "top_k": 30, "temperature": 1.2, "attention_mask": MASK, "max_new_tokens": 9}

    def sample(seed: int, proposer: Proposer | None) -> list:
        torch.manual_seed(seed)
        return [generate(model, BATCH, proposer, **settings).tolist() for _ in range(2)]

    first = sample(0, None)
    assert first[0] != first[1] and first != sample(1, None)
    for name, make in MAKERS.items():
        expected = sample(0, make(Target(model))) if name == "sampled" else first
        assert sample(0, make(Target(model))) == expected


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 0, "typical_p": 0.5},
    {"temperature": 0.6, "top_k": 9, "renormalize_logits": True, "repetition_penalty": 1.4},
]


@pytest.mark.parametrize("settings", SAMPLED)
@pytest.mark.parametrize("sampled", [False, True])
def test_samples_follow_transformers_distribution(model: PreTrainedModel, sampled: bool, settings: dict) -> None:
    settings = {"do_sample": True, "max_new_tokens": 2, **settings}
    draft = DraftProposer(Target(tiny("llama", num_hidden_layers=1)), sampled=sampled, depth=1, nodes=2)
    torch.manual_seed(7)
    rows = 1000
    got = generate(model, PROMPT, draft, num_return_sequences=rows, **settings)
    assert got.shape == (rows, PROMPT.shape[1] + 2)
    first = Counter(got[:, -2].tolist())
    most_likely = first.most_common(1)[0][0]
    second = Counter(got[got[:, -2] == most_likely][:, -1].tolist())
    prompts = PROMPT, torch.cat([PROMPT, torch.tensor([[most_likely]])], dim=1)
    for ids, counts in zip(prompts, (first, second), strict=True):
        # transformers' own probabilities, from its scores
        asked = {**settings, "max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}
        p = model.generate(ids, **asked).scores[0][0].double().softmax(-1)
        total = sum(counts.values())
        seen = torch.tensor([counts[token] for token in range(VOCABULARY)])
        assert not bool(seen[p == 0].any())
        common = p * total >= 5
        cells = torch.cat([seen[common], seen[~common].sum()[None]])
        expected = torch.cat([p[common], p[~common].sum()[None]]) * total
        chi = float(((cells - expected) ** 2 / expected.clamp(min=1e-9))[expected > 0].sum())
        freedom = int((expected > 0).sum()) - 1
        assert chi < freedom + 4 * (2 * freedom) ** 0.5 + 4, (chi, freedom)


def test_nodes_reach_the_proposer(model: PreTrainedModel) -> None:
    class Counting(PlainProposer):
        def propose(self, step: Any, budget: int) -> Tree:
            assert budget <= 3
            return super().propose(step, budget)

    generate(model, PROMPT, Counting(), nodes=3)
