"""`draftless train`: plans, plots, heads to start from, and clear errors for bad input and failures."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decode import Target
from draftless_commands.head_training import parts
from draftless_commands.head_training.record import RECORD, read_record
from heads import LayerConfig, MedusaConfig, MedusaHead, load_head, save_head
from proposers.calibration import FILE, Calibration
from proposers.load import load_draft_head
from tests.support.commands import Call, Run
from tests.support.drafting import draw_head
from tests.support.training_runs import ADAMW, PLANNED, assert_same, losses, train
from training.checkpoint import CHECKPOINT, METRICS, read_metrics
from training.objectives import MedusaObjective
from training.teacher import Batch

SHORT = ["--epochs", "2", "--max-steps", "9", "--save-every", "2", "--validate-every", "3", "--lr", "1e-2"]
PLAN = ["parameters", "examples", "answer tokens", "steps", "memory", "speed", "time", "with features cached"]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def read_plan(out: str) -> dict[str, str]:
    return {row[:21].strip(): row[22:] for row in out.splitlines()}


def refuse(run: Run, *messages: str) -> None:
    """The run ended in one clear line on stderr, after the plan and the progress bar if it had begun."""
    assert not run.out or list(read_plan(run.out)) == PLAN
    errors = [line for line in run.err.splitlines(keepends=True) if line.strip() and "%|" not in line]
    Run(run.status, "", "".join(errors)).refused(*messages)


@pytest.fixture(scope="module")
def trained(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished short training. Tests do not change it."""
    folder = tmp_path_factory.mktemp("trained")
    assert train(place, folder, *SHORT) == 0
    return folder


@pytest.fixture
def call(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*options: str, out: Path = tmp_path / "out") -> Run:
        capsys.readouterr()
        return Run(train(place, out, *options), *capsys.readouterr())

    return run


def test_a_plan_is_printed_and_nothing_is_written(call: Call, trained: Path, tmp_path: Path) -> None:
    run = call(*SHORT, "--plan", "--cache", str(tmp_path / "cache"))
    assert (run.status, run.err) == (0, "")
    rows = read_plan(run.out)
    assert [*rows] == PLAN
    head = load_head(trained)
    assert rows["parameters"].startswith(f"{sum(parameter.numel() for parameter in head.parameters()):,} (")
    assert rows["steps"] == "9" and rows["time"].startswith("1 min")
    assert 0.1 < float(rows["memory"].split(" GiB")[0]) < 20  # the process with torch and transformers in it
    assert list(tmp_path.iterdir()) == []

    before = {file: file.read_bytes() for file in trained.iterdir()}
    assert call(*SHORT, "--plan", out=trained).status == 0
    assert before == {file: file.read_bytes() for file in trained.iterdir()}


def test_the_files_of_a_training(place: Path, trained: Path) -> None:
    assert {file.name for file in trained.iterdir()} == {
        "config.json",
        "model.safetensors",
        CHECKPOINT,
        METRICS,
        RECORD,
    }
    record = read_record(trained)
    words = f"--data answers.jsonl --out {trained.name} --model {place.name} --dtype float32 --heads 3 --layers 2"
    shown = f"draftless train --kind medusa {words} --max-steps 9 --batch-tokens 512"
    options = "--epochs 2", "--lr 0.01", "--save-every 2", "--validate-every 3"
    assert sorted(record["command"].split()) == sorted(" ".join((shown, *options)).split())
    assert record["data"] == ["answers.jsonl"] and record["examples"] + 4 <= 200 and "/" not in json.dumps(record)
    rows = read_metrics(trained)
    assert [row["step"] for row in rows] == [3, 6, 9, 9]
    assert [*losses(trained)[0]] == ["step", "tokens", "loss", "agreement"]
    assert [*rows[0]] == ["step", "tokens", "tau", "acceptance"]
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(trained / "model.safetensors").values())
    target = Target.load(place, dtype="float64")
    with warnings.catch_warnings(action="error"):
        config = load_draft_head(trained, target).config
    assert (config.target_weights, config.target_name) == (target.weights_fingerprint, None), "a path is no name"
    target._fingerprint = "x"
    with pytest.warns(UserWarning, match="with other weights than this target's"):
        load_draft_head(trained, target)


@pytest.mark.parametrize("output", ["own", "target"])
def test_a_head_to_start_from(call: Call, place: Path, trained: Path, tmp_path: Path, output: Any) -> None:
    torch.manual_seed(0)
    head = MedusaHead(MedusaConfig(32, 96, heads=3, layers=2, output=output, draft_size=60))
    head.borrow(torch.randn(96, 32))
    save_head(head, tmp_path / "head")
    assert call(*SHORT, "--init", str(tmp_path / "head"), "--draft-vocab", "60").status == 0
    after = load_head(tmp_path / "out")
    assert after.output == output and after.token_map is not None and len(after.token_map) == 60
    assert head.token_map is not None
    head.token_map += 1
    save_head(head, tmp_path / "head")
    begun = *SHORT, "--resume", "--draft-vocab", "60"
    refuse(call(*begun, "--init", str(tmp_path / "head")), "begun with other settings: draft_vocabulary was")

    run = call(*SHORT, "--init", str(trained), out=tmp_path / "more")
    assert run.status == 0
    best, basis = run.out.splitlines()[-2:]
    assert "at best" in best and basis.startswith("tau is that of trees of 16 nodes, on ")
    assert re.search(r"on \d+ held-out prompts? with at most \d+ new tokens each$", basis)
    first = read_metrics(tmp_path / "more")[0]
    assert first["step"] == 0 and first["tau"] > 1, "the head to start from is the one to be beaten"
    assert losses(tmp_path / "more")[-1]["loss"] < losses(trained)[-1]["loss"]
    refuse(call(*SHORT, "--resume", out=tmp_path / "more"), f"init was '{trained}', now None")


def test_a_peagle_head_begins_with_an_eagle3_head(call: Call, tmp_path: Path) -> None:
    layer = LayerConfig(2, 1, 16, 24)
    head = draw_head("eagle3", 32, 96, torch.float32, draft_size=60, layer=layer, features=(0, 1))
    save_head(head, tmp_path / "head")
    begun = "--kind", "peagle", "--init", str(tmp_path / "head"), "--heads", "4", "--max-steps", "1"
    assert call(*begun, "--lr", "1e-9").status == 0
    after = load_head(tmp_path / "out", torch.float32)
    assert after.kind == "peagle" and after.depth == 4
    own = after.state_dict()
    assert own.pop("mask_hidden").shape == (1, 1, 64)
    torch.testing.assert_close(own, head.state_dict(), rtol=1e-2, atol=1e-6)  # saved in bfloat16
    assert call(*begun, "--lr", "1e-9", "--layers", "2", out=tmp_path / "deep").status == 0
    deep = load_head(tmp_path / "deep", torch.float32)
    new = {name: weight for name, weight in deep.state_dict().items() if name.startswith("layers.1.")}
    assert deep.config.layers == 2 and float(new["layers.1.mlp.down_proj.weight"].abs().max()) < 1e-6
    torch.testing.assert_close(deep.midlayer.state_dict(), head.midlayer.state_dict(), rtol=1e-2, atol=1e-6)
    begin_again = *begun, "--init", str(tmp_path / "deep")
    refuse(call(*begin_again, "--layers", "1", out=tmp_path / "less"), "--layers is 1, and the head of --init")
    refuse(call(*begun, "--draft-vocab", "50", out=tmp_path / "other"), "--draft-vocab is 50, and the head of --init")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nowhere.jsonl"], "--data nowhere.jsonl: there is no such file"),
        (["--lr", "0"], "--lr is 0.0; it must be a positive number"),
        (["--cache-gib", "nan"], "--cache-gib is nan; it must be a number from 0 on"),
        (["--kind", "eagle", "--heads", "3"], "--heads is not for eagle heads; leave it out"),
        (["--kind", "peagle", "--window", "2"], "window is 2, and a draft has 3 tokens, which attend to each other"),
        (["--seed", str(1 << 32)], "--seed is 4294967296; it must be at most 4294967295"),
        (["--decay", "much"], "'much' is neither a number nor pace"),
        (["--kind", "eagle", "--decay", "pace"], "no distance from features; give --regression 0 too"),
        (["--kind", "jump", "--decay", "pace"], "no distance from features, and jump heads have one"),
        (["--plot", "loss.abc"], "--plot loss.abc must end in .png or .svg"),
        (["--model", "nowhere/at/all"], "there is no such folder"),
        (["--max-bad", "2"], "--max-bad is 2.0; it must be a share from 0 to 1"),
        pytest.param(["--device", "cuda"], "--device cuda: torch sees no GPU", marks=WITHOUT_GPU),
    ],
)
def test_bad_options_are_refused(call: Call, tmp_path: Path, options: list[str], message: str) -> None:
    refuse(call(*options), message)
    assert list(tmp_path.iterdir()) == []


def test_too_little_data_is_refused(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}')
    refuse(call("--data", str(file), "--cache", str(tmp_path / "cache")), "no prompt is held out for validation")
    assert list(tmp_path.iterdir()) == [file]


def test_a_tokenizer_of_another_model_is_refused(call: Call, place: Path, save_model: Callable[..., Path]) -> None:
    other = save_model(vocab_size=50, dtype=torch.float32)
    options = ["--model", str(other), "--data", str(place / "answers.jsonl")]
    refuse(call(*options), "the tokenizer makes token 95", "but the model's vocabulary is 50")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MedusaConfig(48, 96, heads=3), "whose hidden size is 48; this target's is 32"),
        (MedusaConfig(32, 96, heads=4), "--heads is 3, and the head of --init {} has 4"),
    ],
)
def test_a_head_for_something_else_is_refused(call: Call, tmp_path: Path, config: MedusaConfig, message: str) -> None:
    head = tmp_path / "head"
    save_head(MedusaHead(config), head)
    refuse(call("--init", str(head), "--layers", "1"), message.format(head))


def test_a_folder_that_is_not_empty_is_refused(call: Call, place: Path, trained: Path, tmp_path: Path) -> None:
    refuse(call(*SHORT, out=trained), f"--out {trained} is not empty; give --resume to go on there")
    refuse(call(*SHORT, "--resume", out=place), f"--out {place} holds a model, but no training to resume")
    (tmp_path / "out").write_text("")
    refuse(call(*SHORT), "out is a file; give a folder")


def test_other_settings_are_all_named(call: Call, trained: Path, tmp_path: Path) -> None:
    changes = ["--lr", "0.02", "--epochs", "3", "--loss", "tv", "--layers", "1", "--validation", "3", "--patience", "4"]
    named = ["epochs was 2, now 3", "lr was 0.01, now 0.02", "loss was 'kl', now 'tv'", "validation was 16, now 3"]
    named += ["patience was 10, now 4", "'layers': 2", "'layers': 1"]
    begun = f"the training in {trained} was begun with other settings: "
    refuse(call(*SHORT, "--resume", *changes, out=trained), begun, *named)
    others = ["--save-every", "5", "--validate-every", "7", "--plot", str(tmp_path / "loss.svg")]
    assert call(*SHORT, "--resume", *others, out=trained).status == 0
    assert "<svg" in (tmp_path / "loss.svg").read_text()


def test_a_setting_that_is_left_out_is_another_one(call: Call, tmp_path: Path) -> None:
    short = [*SHORT, "--max-steps", "2"]
    assert call(*short, "--temperature", "0.5").status == 0
    refuse(call(*short, "--resume"), "begun with other settings: ", "temperature was 0.5, now None")


def test_a_calibration_goes_with_its_head(tmp_path: Path) -> None:
    Calibration(((0.3, 0.0),), ((0.0, 1.0, 0.0),), (100,)).save(tmp_path)
    saved = list[Path]()
    parts._save(lambda folder, dtype: saved.append(folder), tmp_path)
    assert saved == [tmp_path] and not (tmp_path / FILE).exists()


def test_another_model_at_the_same_path_is_refused(
    call: Call, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training resumes, and a cache is read, with the model that they were begun with."""
    out, cache = tmp_path / "out", ["--cache", str(tmp_path / "cache")]
    shutil.copytree(trained, out)
    assert call(*SHORT, *cache, out=tmp_path / "first").status == 0
    other_texts = call(*SHORT, *cache, "--max-length", "20", out=tmp_path / "third")
    refuse(other_texts, "cache were made with other data; choose another folder")
    real: Any = Target.fingerprints.fget
    other = {"weights": "x", "template": "y"}
    monkeypatch.setattr(Target, "fingerprints", property(lambda target: real(target) | other))
    message = f"the model's weights and chat template changed since the training in {out} was begun; give another --out"
    refuse(call(*SHORT, "--resume", out=out), message)
    refused = call(*SHORT, *cache, out=tmp_path / "second")
    refuse(refused, "were made with other weights and template; choose another folder")
    assert call(*SHORT, "--resume", "--changed-model", out=out).status == 0


def test_bad_rows_and_answers_of_another_model_are_named(call: Call, place: Path, tmp_path: Path) -> None:
    file = tmp_path / "more.jsonl"
    file.write_text((place / "answers.jsonl").read_text() + '{"prompt": "a", "response": 7}\n')
    settings = tmp_path / "more.jsonl.settings.json"
    settings.write_text('{"weights": "x", "seed": 0}')
    run = call(*SHORT, "--plan", "--data", str(file))
    assert run.status == 0
    assert f"skipped: 1 of 201 rows cannot be trained on: {file}, line 201: an answer is text, not 7" in run.err
    assert "more.jsonl has answers of another model: its weights changed; heads are" in run.err
    settings.unlink()
    refuse(call(*SHORT, "--plan", "--data", str(file), "--max-bad", "0"), "more than --max-bad 0")


@pytest.mark.parametrize("content", ["", "half", "other", "metrics"])
def test_damaged_files_are_named(call: Call, trained: Path, tmp_path: Path, content: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    whole = (trained / CHECKPOINT).read_bytes()
    (out / CHECKPOINT).write_bytes({"": b"", "half": whole[:-1000]}.get(content, whole))
    if content == "other":
        torch.save([1, 2, 3], out / CHECKPOINT)
    (out / METRICS).write_text('{"step": 1}\n\0\0\0\n')
    message = f"{out / CHECKPOINT} is damaged, or no checkpoint of a training"
    refuse(call(*SHORT, "--resume"), f"{out / METRICS} is damaged" if content == "metrics" else message)


@pytest.mark.parametrize("damage", [float("nan"), 1e4])
def test_an_exploding_loss_ends_the_training(
    call: Call, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: float
) -> None:
    forward, steps = MedusaObjective.forward, 0

    def explode(self: MedusaObjective, batch: Batch) -> Any:
        nonlocal steps
        steps += 1
        loss = forward(self, batch)
        return type(loss)(loss.total * (damage if steps == PLANNED + 8 else 1), loss.anchors, loss.agreed)

    with monkeypatch.context() as patch:
        patch.setattr(MedusaObjective, "forward", explode)
        run = call(*SHORT)
    refuse(run, "the loss exploded at step 8 (", f"{tmp_path / 'out'} keeps what was saved before", "a lower --lr")
    assert torch.load(tmp_path / "out" / CHECKPOINT, weights_only=True)["progress"]["step"] == 6
    assert load_head(tmp_path / "out").depth == 3
    assert call(*SHORT, "--resume").status == 0  # it was bad luck
    assert_same(tmp_path / "out", trained)


def test_a_full_disk_at_any_file(call: Call, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, checkpoint, weights, config: each cannot be written once; a later run resumes from what is there."""
    flush, whole = os.fsync, 0

    def fill_up(file: int) -> None:
        nonlocal whole
        whole -= 1
        if whole == -1:
            os.truncate(file, 10)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(file)

    monkeypatch.setattr(os, "fsync", fill_up)
    for files in (0, 1, 2, 3, 2):
        whole = files
        refuse(call(*SHORT, "--resume"), "No space left on device")
        assert not list((tmp_path / "out").glob("*.tmp"))
    assert call(*SHORT, "--resume").status == 0
    assert_same(tmp_path / "out", trained)


@pytest.mark.slow
def test_launched_by_torchrun(place: Path, tmp_path: Path) -> None:
    alone, script = tmp_path / "alone", tmp_path / "launched.py"
    assert train(place, alone, *SHORT, ADAMW) == 0
    script.write_text(
        "import sys, pathlib, torch.distributed, tests.support.training_runs as runs\n"
        "status = runs.train(*map(pathlib.Path, sys.argv[1:3]), *sys.argv[3:])\n"
        "assert not torch.distributed.is_initialized(), 'a process may abort at its exit'\n"
        "sys.exit(status)\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script]
    command = [*torchrun, place, tmp_path / "out", *SHORT, ADAMW, "--cache", tmp_path / "cache"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([*map(str, command)], env=environment, text=True, capture_output=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("9 of 9 steps") == 1 and "Warning" not in run.stderr
    (row,), (twin,) = losses(tmp_path / "out"), losses(alone)
    assert row["loss"] == pytest.approx(twin["loss"], rel=1e-5)
