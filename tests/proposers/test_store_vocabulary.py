"""A store of answers belongs to one vocabulary, and its tokens never end decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from decode import Target, generate
from decode.models.loading import load_model
from proposers import AnswerStore, MergedProposer
from tests.support.models import VOCABULARY, tiny

ANSWER = [3, 4, 5, 6, 7]


@pytest.fixture
def target(save_model: Callable[..., Path]) -> Target:
    return Target(*load_model(save_model(), dtype="float64", accelerate="off"))


def test_a_store_of_another_vocabulary_is_refused(target: Target, tmp_path: Path) -> None:
    store, file = AnswerStore(100), tmp_path / "answers"
    store.add(ANSWER)
    store.save(file, target)
    other = AnswerStore(100)
    other.load(file, target)
    assert other.answers() == [ANSWER]
    assert target.tokenizer is not None
    target.tokenizer.add_tokens(["another"])
    with pytest.raises(
        ValueError, match=r"answers of another tokenizer \(its vocabulary's fingerprint is [0-9a-f]{16}"
    ):
        other.load(file, target)
    assert other.answers() == [ANSWER]


@pytest.mark.parametrize("token", [VOCABULARY, 1 << 30])
def test_a_file_without_a_fingerprint_needs_known_tokens(token: int, target: Target, tmp_path: Path) -> None:
    store, file = AnswerStore(100), tmp_path / "answers"
    store.add(ANSWER)
    store.save(file)
    AnswerStore(100).load(file, target)
    store.add([3, token])
    store.save(file)
    with pytest.raises(ValueError, match=f"it has token {token}, and the model has {VOCABULARY} tokens"):
        AnswerStore(100).load(file, target)


def test_a_token_outside_the_vocabulary_is_not_drafted() -> None:
    target, prompt = Target(tiny("llama")), [3, 4, 5, 6]
    (expected,) = generate(target, [prompt], None, max_new_tokens=12)
    store = AnswerStore(1000)
    text = prompt + expected.tokens
    for end in range(3, len(text)):
        store.add([*text[end - 3 : end], VOCABULARY, 3])
    (found,) = generate(target, [prompt], MergedProposer(store=store, nodes=12), max_new_tokens=12)
    assert found.tokens == expected.tokens
