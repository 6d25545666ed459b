"""A draft model as a source of merged trees."""

from __future__ import annotations

import pytest

from decode import Target, generate
from docs.measure.profile_sources import read_text, replay
from proposers import (
    DraftProposer,
    DraftSource,
    MergedProposer,
    Source,
)
from tests.support.drafting import Recorder
from tests.support.models import tiny

PROMPTS = [[5, 6, 7, 5, 6], [9, 8, 7, 9], [3]]
SETTINGS = {"max_new_tokens": 30, "stop_ids": ()}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama"))


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
