"""Staged drafts: the text is the target's, the draft is the draft model's own text, and inner proposers save its
passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decode import Engine, Proposer, Sampling, Step, Target, generate
from proposers import DraftProposer, EagleProposer, MergedProposer, NGramProposer, StagedProposer, load_proposer
from tests.support.drafting import Recorder, make_head
from tests.support.models import tiny
from tests.support.tokenizers import byte_level
from training.cut_model import cut_model

BIG = tiny("llama", num_hidden_layers=4)
TARGET, MIDDLE, SMALL = Target(BIG), Target(cut_model(BIG, [0, 1, 2])), Target(cut_model(BIG, [0]))
PROMPTS = [[5, 9, 5, 9, 5] * 6, [7, 8, 9, 7, 8, 9, 7], [20, 30, 20, 30] * 5]
LIMITS: dict[str, Any] = {"max_new_tokens": 24, "stop_ids": ()}
SETTINGS = [{}, {"sampling": Sampling(0.8, seed=3)}]


def list_inner() -> dict[str, Proposer]:
    return {
        "n-grams": NGramProposer(length=4),
        "a draft model": DraftProposer(SMALL, depth=3, nodes=4),
        "a head": EagleProposer(make_head("eagle", MIDDLE), depth=3, nodes=6),
        "merged": MergedProposer(nodes=8),
    }


@pytest.mark.parametrize("inner", list_inner())
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_inner_stage_changes_nothing_but_time(inner: str, settings: dict[str, Any]) -> None:
    """Text, and what is accepted in each step, are those of the draft model alone; alone and in a batch."""
    plain = [answer.tokens for answer in generate(TARGET, PROMPTS, None, **LIMITS, **settings)]
    alone = generate(TARGET, PROMPTS, DraftProposer(MIDDLE, depth=5, nodes=6), **LIMITS, **settings)
    for batch_size in (1, 3):
        staged = StagedProposer(MIDDLE, list_inner()[inner], depth=5, nodes=6)
        answers = generate(TARGET, PROMPTS, staged, batch_size=batch_size, **LIMITS, **settings)
        assert [answer.tokens for answer in answers] == plain
        assert [answer.stats.steps for answer in answers] == [answer.stats.steps for answer in alone]


@pytest.mark.parametrize("settings", SETTINGS)
def test_runners_up_are_nodes(settings: dict[str, Any]) -> None:
    """Of each text of the draft model; they are right where its own choice is not."""
    plain = [answer.tokens for answer in generate(TARGET, PROMPTS, None, **LIMITS, **settings)]
    steps = []
    for width in (1, 3):
        recorder = Recorder(StagedProposer(MIDDLE, NGramProposer(length=4), depth=4, width=width, nodes=1 + 4 * width))
        answers = generate(TARGET, PROMPTS, recorder, **LIMITS, **settings)
        assert [answer.tokens for answer in answers] == plain
        steps.append(sum(answer.stats.steps for answer in answers))
        assert max(tree.width for tree in recorder.trees) == 1 + 4 * width
    assert steps[1] < steps[0]


@pytest.mark.parametrize("name", ["plain", "a draft model", "sampled", "staged"])
def test_a_noise_id_keys_the_noise_of_texts_and_drafts(name: str) -> None:
    makers: dict[str, Callable[[], Proposer | None]] = {
        "plain": lambda: None,
        "a draft model": lambda: DraftProposer(MIDDLE, depth=4, nodes=5),
        "sampled": lambda: DraftProposer(MIDDLE, depth=4, nodes=5, sampled=True),
        "staged": lambda: StagedProposer(MIDDLE, NGramProposer(length=3), depth=4, nodes=5),
    }
    found = []
    for ids in ({"request_id": 2}, {"request_id": 7, "noise_id": 2}, {"request_id": 2, "noise_id": 7}):
        request = Engine(TARGET, makers[name]()).add(PROMPTS[0], **ids, sampling=Sampling(1.0, seed=3), **LIMITS)
        found.append([(chunk.tokens, chunk.drafted) for chunk in request])
    assert found[0] == found[1] != found[2]
    several = Engine(TARGET, makers[name]()).add(PROMPTS[0], n=2, noise_id=6, sampling=Sampling(1.0, seed=3), **LIMITS)
    tokens = [[token for chunk in request for token in chunk.tokens] for request in several]
    assert tokens[0] != tokens[1] == [token for chunk, _ in found[2] for token in chunk]


def test_it_adapts_to_the_device() -> None:
    """Without a size, the depth is chosen by what was accepted; the text stays the same."""
    plain = [answer.tokens for answer in generate(TARGET, PROMPTS, None, **LIMITS)]
    staged = StagedProposer(MIDDLE, NGramProposer(), width=2)
    for proposer in (staged, staged.renew()):
        assert [answer.tokens for answer in generate(TARGET, PROMPTS, proposer, **LIMITS)] == plain


def test_beginnings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft's engine reads the tokens that were accepted since, and not the whole text; and it keeps no more."""
    staged, reused, kept = StagedProposer(MIDDLE, NGramProposer(length=3), depth=4, nodes=5), [], []
    decode = StagedProposer._decode

    def note(self: StagedProposer, step: Step, levels: int) -> Any:
        found = decode(self, step, levels)
        reused.extend(len(step.sequences[0]) - request.stats.reused for request in found.values())
        assert self._engine is not None and self._engine.prefixes is not None
        kept.append(len(self._engine.prefixes._texts))
        return found

    monkeypatch.setattr(StagedProposer, "_decode", note)
    generate(TARGET, PROMPTS[:1], staged, **LIMITS)
    assert reused[0] == len(PROMPTS[0]) + 1 and max(reused[1:]) <= 6 and max(kept) < 12


def test_a_text_that_the_draft_model_has_no_room_for() -> None:
    short = Target(tiny("llama", num_hidden_layers=1, max_position_embeddings=36))
    (plain,), (answer,) = (
        generate(TARGET, PROMPTS[:1], each, **LIMITS)
        for each in (None, StagedProposer(short, NGramProposer(length=3), depth=4, nodes=5))
    )
    assert answer.tokens == plain.tokens


def test_loading_and_errors() -> None:
    loaded = load_proposer("draft", TARGET, draft_model=MIDDLE, draft_proposer="ngram", depth=3)
    assert isinstance(loaded, StagedProposer) and isinstance(loaded.inner, NGramProposer) and loaded.depth == 3
    with pytest.raises(ValueError, match="leave out sampled"):
        load_proposer("draft", TARGET, draft_model=MIDDLE, draft_proposer="ngram", sampled=True)
    with pytest.raises(ValueError, match="needs the target's tokenizer and outputs; it has 99 tokens, the target 96"):
        StagedProposer(Target(tiny("llama", vocab_size=99)), NGramProposer()).begin(TARGET)
    with pytest.raises(ValueError, match="width is 97, more than the 96 tokens"):
        StagedProposer(MIDDLE, NGramProposer(), width=97).begin(TARGET)
    with pytest.raises(ValueError, match="needs the target's tokenizer"):
        tokenizers = byte_level(), byte_level(["ab"])
        small, large = (Target(tiny("llama", vocab_size=300), each) for each in tokenizers)
        StagedProposer(small, NGramProposer()).begin(large)
