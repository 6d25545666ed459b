"""The store of finished answers: what it finds, forgets, and writes to files."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from decode import Target, generate
from decode.models.loading import load_model
from proposers import AnswerStore, MergedProposer
from proposers.sources.answer_store import GRAM, LONGEST_MATCH, OCCURRENCES, StoredSource
from tests.support.models import VOCABULARY, tiny

ANSWER = [3, 4, 5, 6, 7]


def fill(*answers: list[int]) -> AnswerStore:
    store = AnswerStore(1000)
    for answer in answers:
        store.add(answer)
    return store


def find_naively(answers: list[list[int]], tail: list[int]) -> set[tuple[int, int]]:
    """Tokens after every occurrence of the last `GRAM` tokens, and how many tokens before them are the tail's."""
    found = set()
    for answer in answers:
        for place in range(GRAM, len(answer)):
            length = 0
            while length < min(LONGEST_MATCH, len(tail), place) and answer[place - 1 - length] == tail[-1 - length]:
                length += 1
            if length >= GRAM:
                found.add((answer[place], length))
    return found


@pytest.mark.parametrize("capacity", [20, 1000])
@pytest.mark.parametrize("seed", range(12))
def test_a_search_finds_the_newest_occurrences(capacity: int, seed: int) -> None:
    """In a small store, too, which loses its oldest answers again and again."""
    choose, store, answers = random.Random(seed), AnswerStore(capacity), list[list[int]]()
    for _ in range(40):
        answers.append([choose.randrange(4) for _ in range(choose.randrange(1, 20))])
        store.add(answers[-1])
        assert store.answers() == answers or capacity == 20
        tail = [choose.randrange(4) for _ in range(choose.randrange(0, 20))]
        found, expected = store.find(tail), find_naively(store.answers(), tail)
        assert {(copy.token, copy.length) for copy in found} <= expected
        assert min(len(expected), OCCURRENCES) <= len(found) <= OCCURRENCES
        assert all(newer.place > older.place for newer, older in pairwise(found))


def test_memory_is_bounded_and_the_oldest_answers_go() -> None:
    store = AnswerStore(100)
    for number in range(1000):
        store.add([number * 10 + digit for digit in range(9)])
    assert sum(part.itemsize * len(part) for part in vars(store).values() if isinstance(part, array)) == 28 * 100
    kept = list(store.answers())
    assert kept[-1] == [9990 + digit for digit in range(9)]
    assert len(store) <= 100
    assert [copy.token for copy in store.find([9990, 9991, 9992])] == [9993]
    assert not store.find([10, 11, 12])
    store = AnswerStore(10)  # an answer that is longer leaves its end
    store.add(range(100))
    assert list(store.answers()) == [list(range(91, 100))]
    assert [copy.token for copy in store.find([95, 96, 97])] == [98]


def test_two_threads_share_a_store() -> None:
    store, failures = AnswerStore(500), []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(500):
                store.add([seed * 10 + choose.randrange(3) for _ in range(10)])
                for copy in store.find([seed * 10 + choose.randrange(3) for _ in range(4)]):
                    assert copy.token // 10 == seed
        except BaseException as error:
            failures.append(error)
            raise

    threads = [Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(len({token // 10 for token in answer}) == 1 for answer in store.answers())


def test_a_request_that_joins_again_is_one_answer() -> None:
    """As after a change of weights; another request may have the same id."""
    store, text, other = AnswerStore(100, by_prompt=True), [1, 2, 3, 4], [6, 7]
    source = StoredSource(store)

    def observe(sequence: list[int], prompt: int) -> None:
        request = SimpleNamespace(prompt=sequence[:prompt])
        fields = {"request_ids": [0], "kept": [None], "sequences": [sequence], "joined": [0], "requests": [request]}
        source.observe(SimpleNamespace(**fields, committed=[sequence]))  # type: ignore[arg-type]

    for more in ([], [5, 5]):
        text += more
        observe(text, 2)
    observe(other, 1)
    source.keep_answers()
    assert [answer[-4:] for answer in store.answers()] == [[3, 4, 5, 5], [6, 7]]


def test_a_file_brings_the_answers_back(tmp_path: Path) -> None:
    store, other = fill([1, 2, 3, 4], [5], [1, 2, 3, 9]), AnswerStore(1000)
    store.save(tmp_path / "answers")
    other.load(tmp_path / "answers")
    assert list(other.answers()) == list(store.answers())
    assert [copy.token for copy in other.find([1, 2, 3])] == [9, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["answers"]


def test_a_damaged_file_is_refused_and_the_store_stays(tmp_path: Path) -> None:
    store, file = fill([1, 2, 3, 4]), tmp_path / "answers"
    store.save(file)
    whole = file.read_bytes()
    for damaged in (whole[:-3], whole[:-2] + b"\x07\x00", b"", b"text"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"damaged|checksum"):
            store.load(file)
    file.write_bytes(whole.replace(b'"answer_store":"1"', b'"answer_store":"9"'))
    with pytest.raises(ValueError, match="version 9; expected 1"):
        store.load(file)
    with pytest.raises(ValueError, match="missing"):
        store.load(tmp_path / "missing")
    assert list(store.answers()) == [[1, 2, 3, 4]]


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with every file that `write_aside` writes, until the new content is complete."""
    store, file = AnswerStore(1000), tmp_path / "answers"
    store.save(file)
    empty = file.read_bytes()
    store.add(ANSWER)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="answers"):
        patched.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        store.save(file)
    assert file.read_bytes() == empty and [*tmp_path.iterdir()] == [file]


# ---- one vocabulary ----


@pytest.fixture
def target(save_model: Callable[..., Path]) -> Target:
    return Target(*load_model(save_model(), dtype="float64"))


def test_a_store_of_another_vocabulary_is_refused(target: Target, tmp_path: Path) -> None:
    file = tmp_path / "answers"
    fill(ANSWER).save(file, target)
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
    file = tmp_path / "answers"
    fill(ANSWER).save(file)
    AnswerStore(100).load(file, target)
    fill(ANSWER, [3, token]).save(file)
    with pytest.raises(ValueError, match=f"it has token {token}, and the model has {VOCABULARY} tokens"):
        AnswerStore(100).load(file, target)


def test_a_token_outside_the_vocabulary_is_not_drafted() -> None:
    target, prompt = Target(tiny("llama")), [3, 4, 5, 6]
    (expected,) = generate(target, [prompt], None, max_new_tokens=12)
    text = prompt + expected.tokens
    store = fill(*([*text[end - 3 : end], VOCABULARY, 3] for end in range(3, len(text))))
    (found,) = generate(target, [prompt], MergedProposer(store=store, nodes=12), max_new_tokens=12)
    assert found.tokens == expected.tokens
