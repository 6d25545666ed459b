"""Targets with a recurrent state: chains, whose rejected nodes leave no trace in the state."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from decode import Engine, Sampling, Target, Tree, generate, speculate
from decode.models.recurrent import StateSession
from proposers import DraftProposer, MergedProposer, NGramProposer
from tests.support.models import VOCABULARY, tiny

NAMES = ["qwen3_5_text", "falcon_h1", "lfm2"]  # a delta rule, a state space next to attention, a convolution
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 3], [11, 12, 13, 14, 15, 16, 11, 12, 13]]


@pytest.fixture(scope="module", params=NAMES)
def target(request: pytest.FixtureRequest) -> Target:
    return Target(tiny(request.param))


def test_random_rejections_leave_the_logits_of_one_pass(target: Target) -> None:
    """Also prompts shorter than a convolution, chains of one node, and passes that are not kept."""
    draw, text = random.Random(0), torch.randint(3, VOCABULARY, (200,)).tolist()
    plain = target.model(torch.tensor([text]), use_cache=False).logits[0]
    row, length = StateSession(target, 1), draw.randint(1, 6)
    row.verify(Tree.chain([text[:length]]))
    row.keep([[*range(length)]])
    while length < len(text):
        right, wrong = min(draw.randint(1, 5), len(text) - length), draw.choice([0, 0, 1, 4])
        chain = [*text[length : length + right], *(draw.randrange(3, VOCABULARY) for _ in range(wrong))]
        if draw.random() < 0.2:
            row.verify(Tree.chain([[*chain[:1], 5, 6]]))  # and is forgotten
        logits = row.verify(Tree.chain([chain])).logits[0, :right]
        assert torch.allclose(logits, plain[length : length + right], atol=1e-3)  # the delta rule computes in float32
        row.keep([[*range(right)]])
        length += right
        assert row.lengths == [length]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(target: Target, temperature: float) -> None:
    sampling, expected = Sampling(temperature, seed=3), None
    for proposer in (None, NGramProposer(), MergedProposer(nodes=6)):
        answers = generate(target, PROMPTS, proposer, batch_size=3, max_new_tokens=24, sampling=sampling)
        expected = expected or [answer.tokens for answer in answers]
        assert [answer.tokens for answer in answers] == expected


def test_requests_join_and_leave(target: Target) -> None:
    alone = [generate(target, [prompt], max_new_tokens=8 + 4 * i)[0].tokens for i, prompt in enumerate(PROMPTS)]
    engine = Engine(target, NGramProposer(), rows=2)
    requests = [engine.add(PROMPTS[0], max_new_tokens=8), engine.add(PROMPTS[1], max_new_tokens=12)]
    engine.step()
    requests.append(engine.add(PROMPTS[2], max_new_tokens=16))
    for _ in engine:
        pass
    assert [request.answer.tokens for request in requests] == alone


def test_equal_prompts_have_states_of_their_own(target: Target) -> None:
    answers = generate(target, [PROMPTS[0]] * 2, NGramProposer(), batch_size=2, max_new_tokens=12)
    assert answers[0].tokens == answers[1].tokens == generate(target, [PROMPTS[0]], max_new_tokens=12)[0].tokens


def test_transformers_generate(target: Target) -> None:
    ids, model = torch.tensor([PROMPTS[0]]), target.model
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, custom_generate=speculate, **options), expected)
    more: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    with pytest.raises(ValueError, match="keeps a recurrent state"):
        model.generate(ids, custom_generate=speculate, **options, **more)


def test_it_cannot_draft(target: Target) -> None:
    with pytest.raises(ValueError, match=f"{target.config.model_type} cannot draft"):
        generate(Target(tiny("llama")), [PROMPTS[0]], DraftProposer(target), max_new_tokens=4)


def test_a_tree_becomes_its_first_path() -> None:
    tree = Tree.of_rows([([7, 8, 9, 10, 11], [-1, 0, 0, 1, 2]), ([4], [-1])])
    assert tree.best_chains().tokens.tolist() == [[7, 8, 10], [4, 0, 0]]
    assert tree.best_chains().sizes.tolist() == [3, 1]


def test_rows_go_on_without_others(target: Target) -> None:
    session = target.open(3)
    session.extend(PROMPTS)
    assert isinstance(session, StateSession)
    session.select([2, 1])
    assert session.lengths == [len(PROMPTS[2]), len(PROMPTS[1])]
