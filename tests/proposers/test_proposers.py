"""N-gram and draft-model proposers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, LogitsProcessor, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from decode import Sampling, Step, Target, Tree, generate
from decode.models.cost_curve import CostCurve
from proposers import (
    DraftProposer,
    NGramProposer,
    draft,
)
from proposers.draft import count_weights
from tests.support.drafting import Recorder, fix_cost
from tests.support.models import tiny


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama"))


def first_step(target: Target, *sequences: list[int]) -> Step:
    return Step(
        is_prefill=True,
        request_ids=list(range(len(sequences))),
        kept=list(range(len(sequences))),
        sequences=[list(sequence) for sequence in sequences],
        room=[100] * len(sequences),
        committed=[sequence[:-1] for sequence in sequences],
        path=[[0]] * len(sequences),
        tree=Tree.chain([sequence[-1:] for sequence in sequences]),
        logits=torch.empty(0),
        features=None,
        seconds=0.0,
        sampling=Sampling(),
        stop_ids=frozenset([2]),
        target=target,
    )


def drafts(proposer: NGramProposer, target: Target, *sequences: list[int], budget: int = 64) -> list[list[int]]:
    tree = proposer.propose(first_step(target, *sequences), budget)
    return [row[1:size].tolist() for row, size in zip(tree.tokens, tree.sizes.tolist(), strict=True)]


@pytest.mark.parametrize(("size", "length"), [(2, 10), (3, 5), (1, 4)])
def test_prompt_lookup_of_transformers_is_reachable(target: Target, size: int, length: int) -> None:
    """On random texts of few tokens, prefix by prefix, the draft is the one that transformers makes."""
    theirs = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([2]), num_output_tokens=length, max_matching_ngram_size=size, max_length=1000
    )
    found = 0
    for seed in range(40):
        choose = random.Random(seed)
        text = [choose.randrange(2, 3 + seed % 8) for _ in range(40)]
        for end in range(2, 40):
            expected = theirs.get_candidates(torch.tensor([text[:end]]))[0][0, end:].tolist()
            assert drafts(NGramProposer(size, length, first=True), target, text[:end]) == [expected]
            found += bool(expected)
    assert found > 500


def test_the_longest_match_wins_then_the_latest(target: Target) -> None:
    text = [1, 3, 50, 9, 1, 3, 51, 9, 3, 52, 9, 1, 3]
    assert drafts(NGramProposer(length=1), target, text) == [[51]]
    assert drafts(NGramProposer(max_size=1, length=1), target, text) == [[52]]
    assert drafts(NGramProposer(max_size=2, length=1, first=True), target, text) == [[50]]


def test_a_repetition_is_drafted_beyond_its_end(target: Target) -> None:
    assert drafts(NGramProposer(length=7), target, [9, 5, 6, 7, 5, 6, 7]) == [[5, 6, 7, 5, 6, 7, 5]]


def test_nothing_is_drafted_from_an_end_token_on(target: Target) -> None:
    assert drafts(NGramProposer(length=7), target, [5, 6, 2, 7, 8, 5]) == [[6]]


def test_rows_and_budget_are_kept_apart(target: Target) -> None:
    sequences = [[5, 6, 7, 8, 5], [1], [4, 4, 4]]
    assert drafts(NGramProposer(length=3), target, *sequences) == [[6, 7, 8], [], [4, 4, 4]]
    assert drafts(NGramProposer(length=3), target, *sequences, budget=2) == [[6], [], [4]]
    assert drafts(NGramProposer(length=3), target, *sequences, budget=1) == [[], [], []]


def test_nothing_is_drafted_that_a_row_has_no_room_for(target: Target) -> None:
    step = replace(first_step(target, [4, 4, 4], [5, 6, 5], [7, 7]), room=[4, 2, 1])
    proposer = NGramProposer(length=9)
    assert proposer.propose(step, 64).sizes.tolist() == [4, 2, 1]
    drafter = DraftProposer(target, width=2, length=9)
    assert drafter.propose(step, 64).sizes.tolist() == [7, 7, 7]  # all rows share the passes of the draft model


def test_the_index_grows_with_the_text(target: Target) -> None:
    """Reading a text bit by bit finds what reading it at once does."""
    choose = random.Random(1)
    text = [choose.randrange(6) for _ in range(120)]
    growing = NGramProposer(length=5)
    growing.propose(first_step(target, text[:1]), 1)
    for end in range(2, 120):
        growing._texts[0].read(text[:end])
        assert growing._texts[0].draft(5, frozenset([2])) == drafts(NGramProposer(length=5), target, text[:end])[0]


def test_drafts_end_where_they_no_longer_pay(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    text = [5, 6, 7, 8, 9, 10, 5, 6, 7]
    lengths = []
    for steepness in (0.0, 0.2, 5.0):
        fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 1.0 + 63 * steepness]))
        lengths.append(len(drafts(NGramProposer(), target, text)[0]))
    assert lengths[0] > lengths[1] > lengths[2] == 0


def test_copied_drafts_are_cut_by_the_curve_of_the_longest_text(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    curves = {5: CostCurve([1, 64], [1.0, 64.0]), 300: CostCurve([1, 64], [1.0, 1.0])}
    monkeypatch.setattr(target, "cost_curve", lambda batch, context: curves[context])
    assert drafts(NGramProposer(), target, [5, 5, 5, 5, 5]) == [[]]
    assert all(drafts(NGramProposer(), target, [5, 5, 5, 5, 5], [6] * 300))


def test_failures_shorten_and_successes_lengthen_drafts(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 1.0 + 63 * 0.2]))
    text = [5, 6, 7, 8, 9, 10, 5, 6, 7]
    lengths = []
    for accepted in (0, None):
        proposer, step = NGramProposer(), first_step(target, text)
        for _ in range(31):
            drafted = proposer.propose(step, 64).width - 1
            path = list(range(1 + (drafted if accepted is None else accepted)))
            step = replace(step, is_prefill=False, path=[path])
        lengths.append(1 + drafted)
    assert lengths[0] < lengths[1]


def test_a_draft_model_is_right_about_itself(target: Target) -> None:
    answer = generate(target, [[5, 6, 7]], DraftProposer(target, length=4), max_new_tokens=41, stop_ids=[])[0]
    assert answer.stats.tokens == 41 and answer.stats.steps == 9  # the prompt, then 5 tokens a step
    assert answer.stats.accepted_by_depth == [8, 8, 8, 8]
    tree = generate(target, [[5, 6, 7]], DraftProposer(target, width=3, length=4), max_new_tokens=41, stop_ids=[])[0]
    assert tree.tokens == answer.tokens and tree.stats.tau > 3  # the most likely path is not always the greedy one


def test_a_draft_model_reads_no_token_twice(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passes: the prompt and its bonus token; then the token of the deepest level and the bonus token."""
    draft = Target(tiny("llama"))
    widths, forward = [], draft.model.forward
    monkeypatch.setattr(
        draft.model, "forward", lambda **inputs: widths.append(inputs["input_ids"].shape[1]) or forward(**inputs)
    )
    generate(target, [[5, 6, 7]], DraftProposer(draft, length=4), max_new_tokens=30, stop_ids=[])
    first = [width for width in widths if width > 1]
    assert first == [4, *[2] * (len(first) - 1)] and len(first) >= 5


@pytest.mark.parametrize("width", [1, 2])
def test_a_draft_model_stays_right_when_another_row_ends(target: Target, width: int) -> None:
    """Its KV cache keeps each row's own tokens."""
    proposer = DraftProposer(target, width=width, length=4)
    alone = generate(target, [[5, 6, 7]], proposer, max_new_tokens=41, stop_ids=[])[0]
    together = generate(
        target,
        [[9, 8, 6, 5], [5, 6, 7]],
        proposer,
        max_new_tokens=41,
        stop_ids=[],
        criterion=lambda request_id, tokens: request_id == 0 and len(tokens) > 9,
    )
    assert len(together[0].tokens) < 20 and together[1].stats.accepted_by_depth == alone.stats.accepted_by_depth


def test_a_sampled_draft_of_itself_is_always_accepted(target: Target) -> None:
    proposer = DraftProposer(target, sampled=True, length=4)
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=1)
    answer = generate(target, [[5, 6, 7]], proposer, max_new_tokens=41, stop_ids=[], sampling=sampling)[0]
    assert answer.stats.accepted_by_depth == [8, 8, 8, 8]


def test_draft_length_adapts(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    """A draft model that is always right drafts far ahead; a bad one backs off for longer and longer."""
    fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 1.0 + 63 * 0.05]))
    widths = []
    for draft_model, level_time in ((target, 0.15), (Target(tiny("llama", seed=5, num_hidden_layers=1)), 0.45)):
        counts = iter([level_time, 1.0])
        monkeypatch.setattr(draft, "count_weights", lambda config, counts=counts: next(counts))
        recorder = Recorder(DraftProposer(draft_model))
        generate(target, [[5, 6, 7]], recorder, max_new_tokens=100, stop_ids=[])
        widths.append([tree.width for tree in recorder.trees])
    good, bad = widths
    assert good[0] < 6 < max(good) and 1 not in good[:-1]
    tries = [step for step, width in enumerate(bad) if width > 1]
    assert {bad[step] for step in tries[2:]} == {2}
    assert [later - step for step, later in pairwise(tries)][-4:] == [5, 9, 17, 33]


@pytest.mark.parametrize("layers", [1, 4])
def test_a_draft_costs_what_its_weights_do(layers: int) -> None:
    model = tiny("llama", num_hidden_layers=layers)
    passed = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    assert count_weights(model.config) == sum(weight.numel() for weight in passed)


def test_weights_of_an_ungated_model() -> None:
    assert count_weights(GPT2Config()) == pytest.approx(124e6, rel=0.02)


# Logits processors


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
@pytest.mark.parametrize("settings", [{"length": 3}, {"length": 3, "width": 60}, {"length": 3, "sampled": True}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_apply_to_drafts(make: Callable[[], LogitsProcessor], settings: dict, temperature: float) -> None:
    """A model that drafts for itself has every draft token accepted, with each node's own prefix processed."""
    target = Target(tiny("llama"))
    sampling = Sampling(temperature=temperature, seed=1, processors=[make()])
    prompts, limits = [[5, 9, 5, 9], [7, 8, 7, 8]], {"sampling": sampling, "max_new_tokens": 17, "nodes": 200}
    answers = generate(target, prompts, DraftProposer(target, **settings), **limits)
    is_certain = (temperature == 0 or "sampled" in settings) and make is not Alternate
    assert all(answer.stats.steps == 5 for answer in answers) or not is_certain  # the prompt, then 4 tokens each
    if "sampled" not in settings:
        assert [answer.tokens for answer in answers] == [
            each.tokens for each in generate(target, prompts, None, **limits)
        ]
