"""Training: heads learn, and neither stops, kills nor more processes change the result."""

from __future__ import annotations

import random
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from heads import load_head
from proposers import HEAD_PROPOSERS
from tests.support.training_runs import (
    ADAMW,
    assert_same,
    losses,
    start,
    stop_and_resume,
    train,
    train_together,
    train_until,
    write_answers,
)
from training.checkpoint import CHECKPOINT, read_metrics
from training.data import Example, choose_draft_vocabulary
from training.trainer import Trainer, plan_batches

SHORT = ["--epochs", "2", "--save-every", "3", "--validate-every", "4", "--lr", "1e-2"]  # 22 steps


@pytest.fixture(scope="module")
def uninterrupted(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short uninterrupted training, in `out`, with a `cache` next to it."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert train(place, folder / "out", *SHORT, "--cache", str(folder / "cache")) == 0
    return folder


@pytest.mark.parametrize(
    "head",
    [
        ["medusa"],
        pytest.param(["multi-token", "--epochs", "16"], marks=pytest.mark.slow),
        ["hydra"],
        pytest.param(["hydra", "--prefix"], marks=pytest.mark.slow),
        pytest.param(["eagle"], marks=pytest.mark.slow),
        ["eagle3"],
        pytest.param(["eagle3", "--fc-norm", "--normed-feedback"], marks=pytest.mark.slow),
        pytest.param(["peagle", "--epochs", "8"], marks=pytest.mark.slow),  # some of the drafts of a text in each step
        ["jump"],
        pytest.param(["mtp"], marks=pytest.mark.slow),
        ["dflash"],
        pytest.param(["dflash", "--layers", "1", "--pair-rank", "0", "--epochs", "10"], marks=pytest.mark.slow),
    ],
)
def test_a_head_learns_to_draft(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: list[str]) -> None:
    for kind in ("eagle", "eagle3", "jump", "mtp"):  # in 41 tokens deeper trees have no room
        monkeypatch.setitem(HEAD_PROPOSERS, kind, partial(HEAD_PROPOSERS[kind], depth=3))
    answers = write_answers(tmp_path / "answers.jsonl", rows=600)
    options = ["--data", str(answers), "--epochs", "5", "--lr", "1e-2"]
    assert train(place, tmp_path / "out", *options, "--kind", *head) == 0
    blind = "peagle" in head or "--pair-rank" in head  # to the draft tokens before, in a pass of few rows a step
    assert read_metrics(tmp_path / "out")[-1]["tau"] > (0.8 if blind else 0.9) * (3 + 1)
    assert min(losses(tmp_path / "out")[-1]["agreement"]) > (0.8 if blind else 0.95)


# tv alone is slow while a head is bad: its gradient vanishes.
@pytest.mark.filterwarnings("error::UserWarning")  # e.g. for layers whose input and weights differ in dtype
@pytest.mark.parametrize(
    ("head", "output"),
    [
        (["medusa", "--output", "own"], "own"),
        (["hydra", "--prefix", "--output", "target"], "target"),
        (["eagle"], "target"),
        (["eagle3"], "shared"),
        (["peagle"], "shared"),
        (["dflash"], "target"),
        (["jump"], "target"),
        (["mtp"], "target"),
        (["multi-token"], "shared"),
    ],
)
def test_half_precision_and_a_small_draft_vocabulary(place: Path, tmp_path: Path, head: list[str], output: str) -> None:
    options = ["--max-steps", "12", "--dtype", "bfloat16", "--draft-vocab", "40"]
    assert train(place, tmp_path, "--kind", *head, *options) == 0
    trained = load_head(tmp_path)
    assert trained.output == output and ("--prefix" in head) == (getattr(trained, "prefix", None) is not None)
    assert trained.token_map is not None and len(trained.token_map) == trained.draft_size == 40


@pytest.mark.parametrize(
    ("step", "by"), [(6, signal.SIGTERM), (11, signal.SIGINT)]
)  # 6 is saved anyway; 11 ends an epoch
def test_stopped_and_resumed(place: Path, uninterrupted: Path, tmp_path: Path, step: int, by: int) -> None:
    stop_and_resume(step, place, tmp_path, *SHORT, "--cache", str(uninterrupted / "cache"), by=by)
    assert_same(tmp_path, uninterrupted / "out")


@pytest.mark.parametrize(
    "head",
    [
        ["eagle", "--noise", "0.1"],
        *(pytest.param([kind], marks=pytest.mark.slow) for kind in ("peagle", "dflash", "jump", "mtp")),
    ],
)
def test_what_is_random_is_resumed(place: Path, tmp_path: Path, head: list[str]) -> None:
    """Noise, and the anchors of blocks."""
    options = ["--kind", *head, "--max-steps", "9", "--validate-every", "4"]
    assert train(place, tmp_path / "whole", *options) == 0
    stop_and_resume(5, place, tmp_path / "stopped", *options)
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_resuming_without_a_checkpoint_starts_over(place: Path, uninterrupted: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 2, "loss": 3.0}\n{"st')
    assert train(place, tmp_path, *SHORT, "--cache", str(uninterrupted / "cache"), "--resume") == 0
    assert_same(tmp_path, uninterrupted / "out")


def test_training_ends_when_tau_stops_growing(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--lr", "1e-9", "--epochs", "2", "--validate-every", "2", "--patience", "3"]
    assert train(place, tmp_path / "whole", *options) == 0
    assert [row["step"] for row in read_metrics(tmp_path / "whole") if "tau" in row] == [2, 4, 6, 8]
    assert "8 of 22 steps, tau 1.08 at best, then 3 validations without a better one" in capsys.readouterr().out
    stop_and_resume(5, place, tmp_path / "stopped", *options)
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    assert train(place, tmp_path / "stopped", *options, "--resume") == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    assert "it was finished already, and nothing was done" in capsys.readouterr().out


def test_a_finished_training_is_left_alone(
    place: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_step", "_validate", "_save"):
        monkeypatch.setattr(Trainer, name, lambda *_: pytest.fail("something was done"))
    before = {file: file.read_bytes() for file in (uninterrupted / "out").iterdir()}
    assert train(place, uninterrupted / "out", *SHORT, "--cache", str(uninterrupted / "cache"), "--resume") == 0
    assert before == {file: file.read_bytes() for file in (uninterrupted / "out").iterdir()}
    run = capsys.readouterr()
    assert "22 of 22 steps" in run.out and "it was finished already, and nothing was done" in run.out
    assert run.err == ""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, 30])
def test_killed_at_any_moment(place: Path, uninterrupted: Path, tmp_path: Path, kills: int) -> None:
    """While features are cached, in training, and while any file is written."""
    options = [*SHORT, "--resume", "--cache", str(tmp_path / "cache")]
    choose = random.Random(kills)
    statuses = []
    for _ in range(kills):
        process = start(train_until, choose.randint(1, 60), place, tmp_path / "out", *options)
        process.join(300)
        statuses.append(process.exitcode)
    assert set(statuses) <= {0, -signal.SIGKILL} and -signal.SIGKILL in statuses
    assert train(place, tmp_path / "out", *options) == 0
    assert_same(tmp_path / "out", uninterrupted / "out")
    for shard in (uninterrupted / "cache").glob("*.safetensors"):
        assert (tmp_path / "cache" / shard.name).read_bytes() == shard.read_bytes()
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [ADAMW],
        [ADAMW, "--kind", "hydra", "--prefix", "--batch-tokens", "30", "--max-steps", "12"],  # one example a batch
        [ADAMW, "--kind", "eagle", "--batch-tokens", "30", "--max-steps", "12"],
        [ADAMW, "--kind", "eagle3"],
        ["--kind", "eagle3"],
    ],
)
def test_two_processes_match_one(place: Path, tmp_path: Path, options: list[str]) -> None:
    options = [*SHORT, *options]
    assert train(place, tmp_path / "one", *options) == 0
    assert train_together(place, tmp_path / "two", *options, "--cache", str(tmp_path / "cache")) == [0, 0]
    assert_close(tmp_path / "one", tmp_path / "two", rel=1e-4 if ADAMW in options else 1e-2)


@pytest.mark.slow
def test_two_processes_stop_together_and_one_resumes(place: Path, uninterrupted: Path, tmp_path: Path) -> None:
    options = [ADAMW, *SHORT, "--cache", str(uninterrupted / "cache")]
    assert train_together(place, tmp_path / "out", *options, stop=5) == [128 + signal.SIGTERM] * 2
    assert torch.load(tmp_path / "out" / CHECKPOINT, weights_only=True)["progress"]["step"] == 5
    assert train(place, tmp_path / "out", *options, "--resume") == 0
    assert train(place, tmp_path / "whole", *options) == 0
    assert_close(tmp_path / "out", tmp_path / "whole", rel=1e-4)


def assert_close(out: Path, other: Path, rel: float) -> None:
    """Two trainings have the same results except for rounding."""
    rows, others = read_metrics(out), read_metrics(other)
    assert [(row["step"], row["tokens"], row.keys()) for row in rows] == [
        (row["step"], row["tokens"], row.keys()) for row in others
    ]
    assert [row["loss"] for row in losses(out)] == pytest.approx([row["loss"] for row in losses(other)], rel=rel)
    weights = (load_file(folder / "model.safetensors") for folder in (out, other))
    torch.testing.assert_close(*weights, rtol=1e-2, atol=1e-2)


def test_batches_contain_every_example_once() -> None:
    lengths = [3 + number % 17 for number in range(200)] + [500]
    for epoch in range(3):
        batches = plan_batches(lengths, 60, seed=1, epoch=epoch)
        assert sorted(number for batch in batches for number in batch) == list(range(201))
        sizes = [len(batch) * max(lengths[number] for number in batch) for batch in batches if batch != [200]]
        assert len(sizes) == len(batches) - 1  # the longest is too long to share a batch
        assert max(sizes) <= 60 and sum(sizes) < sum(lengths[:-1]) / 0.94  # little is padding
    assert plan_batches(lengths, 60, seed=1, epoch=0) == plan_batches(lengths, 60, seed=1, epoch=0)
    assert plan_batches(lengths, 60, seed=1, epoch=0) != plan_batches(lengths, 60, seed=2, epoch=0)


def test_the_most_frequent_answer_tokens_are_chosen() -> None:
    examples = [Example((9, 9, 9, 4, 4, 2), ((3, 6),)), Example((4, 7, 7), ((1, 3),))]
    for size, tokens in ((3, [2, 4, 7]), (1, [4]), (5, [0, 1, 2, 4, 7]), (None, [*range(10)])):
        assert choose_draft_vocabulary(examples, vocab_size=10, size=size).tolist() == tokens


@pytest.mark.parametrize(
    ("vocabulary", "tokens", "size"),
    [(1 << 16, 40, 1 << 16), (1 << 18, 40, 1 << 13), (1 << 18, 10_000, 9_800), (1 << 18, 60_000, 1 << 15)],
)
def test_the_draft_vocabulary_of_a_large_vocabulary_covers_the_answers(vocabulary: int, tokens: int, size: int) -> None:
    chosen = choose_draft_vocabulary([Example(tuple(range(tokens)), ((0, tokens),))], vocabulary, None)
    assert len(chosen) == size
