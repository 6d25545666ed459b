"""The feature cache: the same batches as without it, a size limit, atomic files, refusal of other models and texts."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from decode import Target
from tests.support.models import VOCABULARY, tiny
from training import feature_cache
from training.data import Example
from training.feature_cache import BatchLoader, FeatureCache
from training.teacher import LABELS, Batch, Teacher

SETTINGS = {"target": "tiny", "layers": [-1]}
ALL = 1 << 30


def make_example(seed: int) -> Example:
    """A random text of 6 to 40 tokens; some have two answers."""
    choose = random.Random(seed)
    tokens = tuple(choose.choices(range(VOCABULARY), k=choose.randint(6, 40)))
    middle = choose.randint(2, len(tokens) - 2)
    first = ((1, middle - 1),) if middle % 2 else ()
    return Example(tokens, (*first, (middle, len(tokens))))


EXAMPLES = [make_example(seed) for seed in range(60)]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "SHARD_TOKENS", 300)
    monkeypatch.setattr(feature_cache, "PASS_TOKENS", 100)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama", dtype=torch.float32))


@pytest.fixture(scope="module")
def teacher(target: Target) -> Teacher:
    return Teacher(target, (1, -1))


def fill(folder: Path, teacher: Teacher, limit: int = ALL) -> FeatureCache:
    made = FeatureCache(folder, SETTINGS)
    made.fill(teacher, EXAMPLES, limit)
    return made


def assert_same(batch: Batch, other: Batch, exact: bool) -> None:
    for name in ("tokens", "answers", "labels"):
        assert torch.equal(getattr(batch, name), getattr(other, name)), name
    if exact:
        assert torch.equal(batch.features, other.features)
    torch.testing.assert_close(batch.features, other.features, rtol=1e-4, atol=1e-5)
    # Stored in half precision: 11 bits, and nothing below 2^-24.
    torch.testing.assert_close(batch.probabilities, other.probabilities, rtol=2**-11, atol=2**-24)


def test_cached_batches_match_those_computed_on_the_fly(teacher: Teacher, tmp_path: Path) -> None:
    made = fill(tmp_path / "cache", teacher)
    assert all(number in made for number in range(60)) and 60 not in made
    passes = [batch for _, batches in feature_cache._plan_shards(tmp_path, EXAMPLES) for batch in batches]
    assert len(passes) > 5
    compute = BatchLoader(EXAMPLES, teacher)
    for numbers in passes:  # the target computed these together
        assert_same(BatchLoader(EXAMPLES, teacher, made)(numbers), compute(numbers), exact=True)
    again = BatchLoader(EXAMPLES, teacher, FeatureCache(tmp_path / "cache", SETTINGS))
    for seed in range(5):
        numbers = random.Random(seed).sample(range(60), 6)
        assert_same(again(numbers), compute(numbers), exact=False)


def test_a_batch_matches_the_target(target: Target) -> None:
    numbers = [3, 17, 40]
    batch = BatchLoader(EXAMPLES, Teacher(target, (-1,)))(numbers)
    for row, number in enumerate(numbers):
        example, text = EXAMPLES[number], slice(len(EXAMPLES[number].tokens))
        predicting = [t for begin, end in example.spans for t in range(begin - 1, end - 1)]
        assert batch.answers[row].nonzero().flatten().tolist() == predicting
        assert batch.tokens[row, text].tolist() == [*example.tokens]
        with torch.no_grad():
            output = target.model(input_ids=torch.tensor([example.tokens]), output_hidden_states=True)
        torch.testing.assert_close(batch.features[row, text], output.hidden_states[-1][0], rtol=1e-4, atol=1e-5)
        p, labels = output.logits[0, predicting].softmax(dim=-1).topk(LABELS)
        torch.testing.assert_close(batch.probabilities[row, predicting], p, rtol=1e-4, atol=1e-6)
        assert torch.equal(batch.labels[row, predicting], labels)


def test_a_vocabulary_smaller_than_the_labels() -> None:
    teacher = Teacher(Target(tiny("llama", vocab_size=30)), (-1,))
    batch = BatchLoader([Example((5, 6, 7), ((1, 3),))], teacher)([0])
    assert batch.labels.shape == (1, 3, 30)
    torch.testing.assert_close(batch.probabilities.sum(dim=-1), torch.tensor([[1.0, 1.0, 0.0]]))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.75])
def test_the_limit_is_kept(teacher: Teacher, tmp_path: Path, share: float) -> None:
    def measure(made: FeatureCache) -> int:
        return sum(shard.stat().st_size for shard in made.folder.glob("*.safetensors"))

    whole = measure(fill(tmp_path / "whole", teacher))
    made = fill(tmp_path / "part", teacher, int(share * whole))
    size = measure(made)
    assert share * whole - 0.25 * whole < size <= share * whole
    assert share * 60 - 20 < sum(number in made for number in range(60)) < 60
    assert measure(fill(tmp_path / "part", teacher, int(share * whole))) == size
    numbers = [*range(10, 20)]
    assert_same(BatchLoader(EXAMPLES, teacher, made)(numbers), BatchLoader(EXAMPLES, teacher)(numbers), exact=False)


def test_processes_fill_their_shares(teacher: Teacher, tmp_path: Path) -> None:
    expected = fill(tmp_path / "one", teacher).folder
    made = [FeatureCache(tmp_path / "three", SETTINGS) for _ in range(3)]
    for process, part in enumerate(made):
        part.fill(teacher, EXAMPLES, ALL, process, 3)
    shards = sorted(path.name for path in expected.glob("*.safetensors"))
    assert all((tmp_path / "three" / name).read_bytes() == (expected / name).read_bytes() for name in shards)
    assert 0 not in made[0] or 59 not in made[0] or 30 not in made[0]
    for part in made:
        part.scan()
        assert all(number in part for number in range(60))


def test_existing_shards_are_not_made_again(teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, folder = fill(tmp_path / "one", teacher).folder, tmp_path / "two"
    compute, passes = Teacher.compute, itertools.count(1)

    def fail_at_the_eighth(self: Teacher, examples: list[Example]) -> Any:
        if next(passes) == 8:
            raise KeyboardInterrupt
        return compute(self, examples)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Teacher, "compute", fail_at_the_eighth)
        fill(folder, teacher)
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert 0 < len(times) < len(list(expected.glob("*.safetensors")))
    (folder / ".00003.safetensors.tmp").write_bytes(b"half of a shard")
    fill(folder, teacher)
    assert all(path.stat().st_mtime_ns == before for path, before in times.items())
    assert all(path.read_bytes() == (folder / path.name).read_bytes() for path in expected.glob("*"))
    assert not list(folder.glob("*.tmp"))
    monkeypatch.setattr(FeatureCache, "_write", lambda *_: pytest.fail("a shard was made again"))
    fill(folder, teacher)


@pytest.mark.parametrize("content", [b"", b"half", None])
def test_a_damaged_shard_is_named(teacher: Teacher, tmp_path: Path, content: bytes | None) -> None:
    expected = fill(tmp_path / "cache", teacher)
    path = tmp_path / "cache" / "00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] if content is None else content)
    with pytest.raises(ValueError, match=r"00001.safetensors is damaged .*; delete it, and it is made again"):
        FeatureCache(tmp_path / "cache", SETTINGS)
    path.unlink()
    fill(expected.folder, teacher)
    assert path.read_bytes() == whole


def test_a_cache_of_something_else_is_refused(teacher: Teacher, tmp_path: Path) -> None:
    folder = fill(tmp_path / "cache", teacher).folder
    with pytest.raises(ValueError, match="were made with other layers; choose another folder"):
        FeatureCache(folder, SETTINGS | {"layers": [2]})
    (folder / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"settings.json is damaged"):
        FeatureCache(folder, SETTINGS)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("the only copy")
    with pytest.raises(ValueError, match="other holds other things than cached features"):
        FeatureCache(tmp_path / "other", SETTINGS)


def test_one_training_fills_a_cache_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, entered = FeatureCache(tmp_path, SETTINGS), threading.Event()

    def enter() -> None:
        with made.locked():
            entered.set()

    with FileLock(tmp_path / ".lock"):
        threading.Thread(target=enter).start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    assert capsys.readouterr().err == f"another training is filling {tmp_path}: waiting for it\n"
