"""Draft models: what they read, how far ahead they draft, and outputs that are padded to another size."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, LogitsProcessor, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from decode import Engine, Sampling, Target, generate
from decode.devices.cost_curve import CostCurve
from proposers import DraftProposer
from proposers.draft_models import proposer as draft
from proposers.draft_models.proposer import count_weights
from tests.support.drafting import Recorder, texts
from tests.support.enumeration import compare_third_tokens
from tests.support.models import VOCABULARY, tiny
from tests.support.speculating import make_tokenizer

TOKENIZER = make_tokenizer()
PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9], [95, 95]]


def test_a_draft_model_is_right_about_itself(target: Target) -> None:
    limits: dict[str, Any] = {"max_new_tokens": 41, "stop_ids": []}
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=1)
    for sampled, settings in ((False, {}), (True, {"sampling": sampling})):
        proposer = DraftProposer(target, sampled=sampled, depth=4, nodes=5)
        (answer,) = generate(target, [[5, 6, 7]], proposer, **limits, **settings)
        assert answer.stats.tokens == 41 and answer.stats.steps == 9  # the prompt, then 5 tokens a step
        assert answer.stats.accepted_by_depth == [8, 8, 8, 8]
    (plain,) = generate(target, [[5, 6, 7]], None, **limits)
    (tree,) = generate(target, [[5, 6, 7]], DraftProposer(target, width=3, depth=4, nodes=13), **limits)
    assert tree.tokens == plain.tokens and tree.stats.tau > 3  # the most likely path is not always the greedy one


@pytest.mark.parametrize("processors", [(), (RepetitionPenaltyLogitsProcessor(1.2),)])
def test_a_sampled_chain_is_independent_of_neighbours(target: Target, processors: tuple[LogitsProcessor, ...]) -> None:
    """Each row drafts by its own room: near its end, where the others draft on, and where it drafts nothing."""
    draft = Target(tiny("llama", num_hidden_layers=1, seed=1))

    def answer(seed: int, *neighbours: dict[str, int]) -> list[int]:
        engine = Engine(target, DraftProposer(draft, sampled=True, depth=4, nodes=5))
        sampling = Sampling(0.9, seed=seed, processors=processors)
        request = engine.add(PROMPTS[0], request_id=0, sampling=sampling, stop_ids=[], max_new_tokens=3 + seed % 5)
        for limits in neighbours:
            engine.add(PROMPTS[1], sampling=Sampling(0.7, seed=9), stop_ids=[], **limits)
        while request.answer is None:
            engine.step()
        engine.close()
        return request.answer.tokens

    for seed in range(16):
        alone = answer(seed)
        for limits in ({"max_new_tokens": 2}, {"max_new_tokens": 20}, {"max_new_tokens": 9, "nodes": 3}):
            assert answer(seed, limits) == answer(seed, limits, {"max_new_tokens": 4, "nodes": 1}) == alone
    plain = generate(target, PROMPTS[0], None, sampling=Sampling(0.9, seed=5), max_new_tokens=9, stop_ids=[])[0]
    engine = Engine(target, DraftProposer(draft, sampled=True, depth=4, nodes=5))
    options = {"sampling": Sampling(0.9, seed=5), "max_new_tokens": 9, "stop_ids": []}
    bare, _ = engine.add(PROMPTS[0], request_id=0, nodes=1, **options), engine.add(PROMPTS[1], **options)
    assert [token for chunk in bare for token in chunk.tokens] == plain.tokens


def watch_widths(draft: Target) -> list[int]:
    """How many tokens a row each pass of a model has, from now on."""
    widths = list[int]()
    draft.model.register_forward_pre_hook(
        lambda *given: widths.append(given[2]["input_ids"].shape[1]), with_kwargs=True
    )
    return widths


def test_a_draft_model_reads_no_token_twice(target: Target) -> None:
    """Its passes: the prompt and its bonus token; then the token of the deepest level and the bonus token."""
    draft = Target(tiny("llama"))
    widths = watch_widths(draft)
    generate(target, [[5, 6, 7]], DraftProposer(draft, depth=4, nodes=5), max_new_tokens=30, stop_ids=[])
    first = [width for width in widths if width > 1]
    assert first == [4, *[2] * (len(first) - 1)] and len(first) >= 5


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_a_draft_model_reads_a_conversation_once(target: Target, kind: str) -> None:
    """A new text that begins like the last one is read from there on; another one is read whole."""
    draft = Target(tiny(kind))
    widths = watch_widths(draft)
    proposer, first = DraftProposer(draft, depth=2, nodes=3), [*range(5, 45)]
    (answer,) = generate(target, [first], proposer, max_new_tokens=9, stop_ids=[])
    prompts = {"goes on": [*first, *answer.tokens, 7, 8], "other": [*range(50, 90)]}
    for name, prompt in prompts.items():
        widths.clear()
        expected = generate(target, [prompt], DraftProposer(draft, depth=2, nodes=3), max_new_tokens=9, stop_ids=[])
        whole = max(widths)
        widths.clear()
        found = generate(target, [prompt], proposer, max_new_tokens=9, stop_ids=[])
        assert found[0].tokens == expected[0].tokens and found[0].stats.steps == expected[0].stats.steps
        assert whole == len(prompt) + 1 and (max(widths) < 20) == (name == "goes on")


@pytest.mark.parametrize("width", [1, 2])
def test_a_draft_model_stays_right_when_another_row_ends(target: Target, width: int) -> None:
    """Its KV cache keeps each row's own tokens."""
    proposer = DraftProposer(target, width=width, depth=4, nodes=1 + 4 * width)
    limits: dict[str, Any] = {"max_new_tokens": 41, "stop_ids": []}
    limits["criterion"] = lambda request_id, tokens: request_id == 0 and len(tokens) > 9
    alone = generate(target, [[5, 6, 7]], proposer, request_ids=[1], **limits)[0]
    together = generate(target, [[9, 8, 6, 5], [5, 6, 7]], proposer, **limits)
    assert len(together[0].tokens) < 20 and together[1].stats.accepted_by_depth == alone.stats.accepted_by_depth


def test_draft_length_adapts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model that is always right drafts far ahead; a bad one backs off for longer and longer."""
    target = Target(tiny("llama"), deterministic=CostCurve([1, 64], [1.0, 1.0 + 63 * 0.05]))
    target.model.lm_head.weight.data *= 50  # it is sure of its tokens
    widths = []
    for draft_model, level_time in ((target, 0.15), (Target(tiny("llama", seed=5, num_hidden_layers=1)), 0.45)):
        for sampled in (False, True):
            counts = iter([level_time, 1.0])
            monkeypatch.setattr(draft, "count_weights", lambda config, counts=counts: next(counts))
            recorder = Recorder(DraftProposer(draft_model, sampled=sampled))
            sampling = Sampling(0.3 * sampled, seed=1)
            generate(target, [[5, 6, 7]], recorder, max_new_tokens=100, stop_ids=[], sampling=sampling)
            widths.append([tree.width for tree in recorder.trees])
    for good, bad in zip(widths[:2], widths[2:], strict=True):
        assert max(good) > 6 and 1 not in good[:-1]
        tries = [step for step, width in enumerate(bad) if width > 1]
        assert {bad[step] for step in tries[2:]} == {2}
        assert [later - step for step, later in pairwise(tries)][-4:] == [5, 9, 17, 33]


def test_a_draft_costs_what_its_weights_do() -> None:
    for layers in (1, 4):
        model = tiny("llama", num_hidden_layers=layers)
        passed = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
        assert count_weights(model.config) == sum(weight.numel() for weight in passed)
    assert count_weights(GPT2Config()) == pytest.approx(124e6, rel=0.02)  # no gates


# ---- logits processors ----


class Alternate(LogitsProcessor):
    """Allows even tokens at even places and odd ones at odd places. Fails after any other token, as a grammar does.

    It is a user's own, so it is not applied to drafts.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        text = input_ids[0, 4:].tolist()
        assert all(token % 2 == place % 2 for place, token in enumerate(text))
        wrong = torch.arange(scores.shape[-1]) % 2 != len(text) % 2
        return scores.masked_fill(wrong, -torch.inf)


PROCESSORS: dict[str, Callable[[], LogitsProcessor]] = {
    "penalty": lambda: RepetitionPenaltyLogitsProcessor(1.2),
    "n-grams": lambda: NoRepeatNGramLogitsProcessor(1),
    "grammar": Alternate,
}


@pytest.mark.parametrize("make", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize(
    "settings",
    [{"depth": 3, "nodes": 4}, {"depth": 3, "nodes": 181, "width": 9}, {"depth": 3, "nodes": 4, "sampled": True}],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_apply_to_drafts(
    target: Target, make: Callable[[], LogitsProcessor], settings: dict, temperature: float
) -> None:
    """A model that drafts for itself has every draft token accepted, with each node's own prefix processed."""
    sampling = Sampling(temperature=temperature, seed=1, processors=[make()])
    prompts, limits = [[5, 9, 5, 9], [7, 8, 7, 8]], {"sampling": sampling, "max_new_tokens": 17, "nodes": 200}
    answers = generate(target, prompts, DraftProposer(target, **settings), **limits)
    is_chain, is_drawn_alike = "width" not in settings, temperature == 0 or "sampled" in settings
    if is_drawn_alike and make is not Alternate:
        # the prompt, then 4 tokens each; the most likely path is not always the greedy one
        assert all(answer.stats.steps == 5 or (not is_chain and answer.stats.tau > 2) for answer in answers)
    if "sampled" not in settings:
        assert [answer.tokens for answer in answers] == texts(target, prompts, None, **limits)


# ---- outputs that are padded to another size ----


def make(size: int = VOCABULARY, **settings: Any) -> Target:
    return Target(tiny("llama", vocab_size=size, **settings), TOKENIZER)


@pytest.mark.parametrize("size", [VOCABULARY - 6, VOCABULARY + 8])
@pytest.mark.parametrize("settings", [{}, {"width": 3}, {"sampled": True}])
def test_only_shared_tokens_are_drafted(size: int, settings: dict[str, Any]) -> None:
    """No token is drafted that one of the models lacks, and q is a distribution over the others."""
    target = make()
    recorder = Recorder(DraftProposer(make(size), depth=3, nodes=10, **settings))
    for temperature in (0.0, 1.0):
        limits = {"sampling": Sampling(temperature, seed=1), "max_new_tokens": 14, "stop_ids": ()}
        found, plain = (texts(target, PROMPTS, proposer, **limits) for proposer in (recorder, None))
        if "sampled" not in settings or not temperature:
            assert found == plain
    drafted = torch.cat([tree.tokens[:, 1:].flatten() for tree in recorder.trees])
    assert len(drafted) and int(drafted.max()) < VOCABULARY
    for tree in recorder.trees:
        if tree.q is not None:
            assert tree.q.shape[-1] == VOCABULARY and not tree.q[..., min(size, VOCABULARY) :].any()
            assert torch.allclose(tree.q[:, :-1].sum(dim=-1), torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("size", [9, 15])
def test_sampled_drafts_keep_the_distribution(size: int) -> None:
    target, draft = make(12), make(size, num_hidden_layers=1)
    answers = [
        generate(target, [[1, 2, 3]] * 300, proposer, sampling=Sampling(1.0, seed=seed), max_new_tokens=4, stop_ids=())
        for seed, proposer in ((1, None), (2, DraftProposer(draft, depth=3, sampled=True, nodes=4)))
    ]
    assert compare_third_tokens(*answers) < 33  # 11 degrees of freedom, p = 0.0005
