"""Sources of merged trees that draft as other proposers do: lookahead's pool, any proposer, and a draft model."""

from __future__ import annotations

import pytest
import torch

from decode import Target, Tree, generate
from docs.measure.profile_sources import read_text, replay
from proposers import (
    DraftProposer,
    DraftSource,
    HydraProposer,
    LookaheadProposer,
    MergedProposer,
    NGramProposer,
    Source,
)
from proposers.lookahead import Pool
from proposers.sources import LookaheadSource, ProposerSource
from proposers.sources.lookahead import Grams, _begin, _read_tree
from tests.support.drafting import Recorder, make_head
from tests.support.models import VOCABULARY, tiny

PROMPTS = [[5, 6, 7, 5, 6], [9, 8, 7, 9], [3]]
SETTINGS = {"max_new_tokens": 30, "stop_ids": ()}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama"))


def test_pooled_n_grams_go_on_after_each_token() -> None:
    pool, source = Pool(3), LookaheadSource()
    for gram in ([1, 2, 3, 4], [1, 5, 6, 7], [2, 3, 9, 9]):
        pool.add(gram)
    root = Grams(pool, _begin(pool, 1))
    assert [(token, kind) for token, _, kind in source.continuations(root)] == [(5, (1, 0)), (2, (1, 1))]
    node = source.follow(root, 2)  # the n-gram that goes on, then those that begin here
    assert [(token, kind) for token, _, kind in source.continuations(node)] == [(3, (2, 1)), (3, (1, 0))]
    node = source.follow(node, 3)
    assert [(token, kind) for token, _, kind in source.continuations(node)] == [(4, (3, 1)), (9, (2, 0))]
    assert source.continuations(source.follow(node, 8)) == []


def test_predictions_after_rejected_nodes_become_n_grams() -> None:
    pool = Pool(3)
    _read_tree(pool, [1, 2], [3, 4, 5, 6, 0], [-1, 0, 0, 1, -1], [10, 11, 12, 13, 14])  # the last one is padding
    grams = {1: (2, 3, 10), 2: (3, 5, 12), 3: (4, 6, 13)}
    assert {first: pool.find(first)[0] for first in grams} == grams
    assert pool.find(2) == [(3, 5, 12), (3, 4, 11)]
    _read_tree(pool, [], [7], [-1], [8])  # too short
    assert pool.find(7) == ()


def test_pools_hold_what_the_model_predicts(target: Target) -> None:
    """Without drafts, exactly the n-grams of the text."""
    source = LookaheadSource()
    answer = generate(target, PROMPTS[:1], MergedProposer([source], nodes=1), **SETTINGS)[0]
    text, grams = [*answer.prompt, *answer.tokens], {}
    for end in range(4, len(text)):  # the last token's step is not observed
        grams[text[end - 4]] = tuple(text[end - 3 : end])
    pool = source._pools[0]
    assert {first: pool.find(first)[0] for first in grams} == grams


@pytest.mark.parametrize("make", [lambda: NGramProposer(length=6, first=True), lambda: LookaheadProposer(window=1)])
def test_any_proposer_can_be_the_only_source(target: Target, make) -> None:
    """The first tree of each text is the other proposer's own, because nothing is learned yet."""
    alone, merged = Recorder(make()), Recorder(MergedProposer([ProposerSource(make)], nodes=16))
    for recorder in (alone, merged):
        generate(target, [[*range(VOCABULARY)]], recorder, **{**SETTINGS, "max_new_tokens": 12}, nodes=16)
    (text, paths), (other, others) = (next(iter(recorder.drafted.items())) for recorder in (alone, merged))
    assert text == other and paths.keys() == others.keys() and paths


def test_a_proposer_that_reads_features_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="HydraProposer reads features; use HeadSource"):
        ProposerSource(lambda: HydraProposer(make_head("hydra", target)))


def test_scores_of_another_proposer_become_probabilities(target: Target) -> None:
    draft = ProposerSource(lambda: DraftProposer(target, width=2, length=3))
    recorder = Recorder(MergedProposer([draft], nodes=7))
    answers = generate(target, PROMPTS, recorder, **SETTINGS)
    assert [answer.tokens for answer in answers] == [
        answer.tokens for answer in generate(target, PROMPTS, None, **SETTINGS)
    ]
    assert all(accepted for row in recorder.accepted[1:] for accepted in row)  # it is right about itself


def test_a_draft_model_continues_the_tree(target: Target) -> None:
    """As its own draft model the target is right about every token, in rows that end at different times."""
    source = DraftSource(DraftProposer(target, length=4))
    recorder = Recorder(MergedProposer([], source, nodes=41))
    lengths = [30, 9, 17]
    criterion = lambda request_id, tokens: len(tokens) >= lengths[request_id]  # noqa: E731
    answers = generate(target, PROMPTS, recorder, **SETTINGS, criterion=criterion)
    plain = generate(target, PROMPTS, None, **SETTINGS, criterion=criterion)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    assert {accepted for row in recorder.accepted[1:] for accepted in row} == {4}
    accepted = sum(sum(answer.stats.accepted_by_depth) for answer in answers)
    assert recorder.proposer.accepted_by_source == {"draft": accepted}


def test_a_draft_model_reads_no_token_twice(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted tokens stay in its cache, whoever named them."""
    draft = Target(tiny("llama"))
    widths: list[int] = []
    forward = draft.model.forward
    monkeypatch.setattr(
        draft.model, "forward", lambda **inputs: widths.append(inputs["input_ids"].shape[1]) or forward(**inputs)
    )
    generate(target, PROMPTS[:1], MergedProposer([], DraftSource(DraftProposer(draft, length=4)), nodes=41), **SETTINGS)
    first = [width for width in widths if width > 1]
    # The prompt and its bonus token; then the token of the deepest level and the bonus token.
    assert first == [len(PROMPTS[0]) + 1, *[2] * (len(first) - 1)] and len(first) >= 5


def test_drafts_follow_what_other_sources_named(target: Target) -> None:
    class WrongSource(Source):
        def continuations(self, state):
            return [(token, 0.9, None) for token in range(20, 23)] if not state.draft else []

    draft = DraftSource(DraftProposer(Target(tiny("llama", num_hidden_layers=1)), width=4, length=3))
    recorder = Recorder(MergedProposer([WrongSource()], draft, nodes=40))
    answers = generate(target, PROMPTS, recorder, **SETTINGS)
    assert [answer.tokens for answer in answers] == [
        answer.tokens for answer in generate(target, PROMPTS, None, **SETTINGS)
    ]
    first = next(iter(recorder.drafted.values()))
    assert {path[0] for path in first} >= {20, 21, 22}
    assert any(len(path) == 2 and path[0] in (20, 21, 22) for path in first)


def test_wrong_draft_models_are_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="sampled=False"):
        DraftSource(DraftProposer(target, sampled=True))
    other = DraftSource(DraftProposer(Target(tiny("llama", vocab_size=50))))
    with pytest.raises(ValueError, match="a draft must share the target's tokenizer"):
        generate(target, PROMPTS, MergedProposer([], other, nodes=4), **SETTINGS)


def test_sources_can_be_profiled_without_a_model() -> None:
    proposer = MergedProposer(nodes=16)
    seconds = list(replay(read_text(), 2000, proposer, steps=40))
    assert len(seconds) == 40 and min(seconds) > 0
    assert sum(proposer.accepted_by_source.values()) > 0


def test_renewed_sources_share_no_state(target: Target) -> None:
    for source in (ProposerSource(NGramProposer), LookaheadSource()):
        proposer = MergedProposer([source], nodes=8)
        trees: list[list[Tree]] = []
        for renewed in (proposer, proposer.renew()):
            recorder = Recorder(renewed)
            generate(target, PROMPTS, recorder, **SETTINGS)
            trees.append(recorder.trees)
        assert all(torch.equal(one.tokens, other.tokens) for one, other in zip(*trees, strict=True))
    source = DraftSource(DraftProposer(target))
    assert source.renew()._session is not source._session
