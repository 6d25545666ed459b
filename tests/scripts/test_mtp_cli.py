"""`train --write-checkpoint` and `check --restore-mtp`: MTP modules in checkpoints, which vLLM serves."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import decode
from decode import Target
from draftless_commands import check, generate
from draftless_commands.checking.serving import ask_engine, check_engine
from heads import load_head
from heads.formats.written_checkpoint import read_checkpoint
from proposers import load_proposer
from tests.support.commands import Call, Run
from tests.support.models import limit_threads
from tests.support.mtp_checkpoints import make_checkpoint
from tests.support.training_runs import save_predictable, stop_and_resume, train, train_predictable, walk

SHORT = ["--kind", "mtp", "--max-steps", "4", "--validate-every", "2", "--save-every", "1", "--lr", "1e-2"]


LEAST = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}  # that vLLM takes
Place = Callable[[str], Path]


def name_for_vllm(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A Qwen2 with MiMo's module as MiMo. For transformers it remains a Qwen2."""
    named = {"architectures": ["MiMoForCausalLM"]} if config["model_type"] == "qwen2" else {}
    config |= {"num_nextn_predict_layers": 1, **named}


@pytest.fixture(scope="module")
def make_place(save_model: Callable[..., Path]) -> Place:
    """Saves a predictable target, whose module is not trained, and some of its answers."""

    def make(kind: str) -> Path:
        folder = save_predictable(save_model(num_hidden_layers=1), rows=200)
        with limit_threads(1):
            model = train_predictable(2, kind, **LEAST)
        make_checkpoint(kind, folder, name_for_vllm, model)
        return folder

    return make


@pytest.fixture(scope="module")
def place(make_place: Place) -> Path:
    return make_place("qwen2")


@pytest.fixture
def call(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*options: str | Path, model: Path = place) -> Run:
        capsys.readouterr()
        return Run(train(model, tmp_path / "out", *map(str, options)), *capsys.readouterr())

    return run


def lose(folder: Path, into: Path) -> Path:
    """The target as a fine-tuning leaves it: without its module."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(into)
    for name in ("answers.jsonl", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, into / name)
    return into


@pytest.fixture
def tuned(place: Path, tmp_path: Path) -> Path:
    return lose(place, tmp_path / "tuned")


def assert_written(folder: Path, out: Path, place: Path) -> None:
    """A folder has the checkpoint with the module that a training left in `out`."""
    written, before = read_checkpoint(folder), read_checkpoint(place)
    torch.testing.assert_close(written.others, before.others, rtol=0, atol=0)
    assert all(tensor.dtype == torch.float32 for tensor in written.modules.values())
    states, trained = load_head(folder).state_dict(), load_head(out, torch.float32).state_dict()
    torch.testing.assert_close(states, trained, rtol=0, atol=0)
    assert not states["eh_proj.weight"].equal(load_head(place).state_dict()["eh_proj.weight"])


def test_a_trained_module_is_written_to_a_copy_of_the_checkpoint(
    call: Call, place: Path, tmp_path: Path, run_main: Call
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run = call(*SHORT, "--init", place, "--write-checkpoint", first)
    assert run.status == 0 and run.out.splitlines()[-1] == f"{first} is {place} with the trained module"
    assert_written(first, tmp_path / "out", place)
    assert call(*SHORT, "--init", place, "--resume", "--write-checkpoint", second).status == 0
    assert load_file(first / "model-mtp.safetensors").keys() == read_checkpoint(place).modules.keys()
    assert_written(second, tmp_path / "out", place)

    ask = ["--prompt", "abc", "--max-new-tokens", "20", "--dtype", "float64", "--json", "--model"]
    (plain,), (drafted,) = (
        run_main(generate.main, *ask, folder, "--proposer", name).rows
        for folder, name in ((place, "none"), (first, "mtp"))
    )
    assert drafted["tokens"] == plain["tokens"]


def test_a_training_that_was_stopped_writes_at_its_end(place: Path, tmp_path: Path) -> None:
    options = [*SHORT, "--init", str(place), "--write-checkpoint", str(tmp_path / "new")]
    stop_and_resume(2, place, tmp_path / "out", *options)
    assert_written(tmp_path / "new", tmp_path / "out", place)
    assert {file.name for file in tmp_path.iterdir()} == {"out", "new"}


def test_a_training_for_a_model_without_a_module_takes_its_bases_names(
    call: Call, place: Path, tuned: Path, tmp_path: Path
) -> None:
    run = call(*SHORT, "--init", place, "--write-checkpoint", tmp_path / "new", model=tuned)
    assert run.status == 0, run
    assert_written(tmp_path / "new", tmp_path / "out", place)
    more = ["--out", tmp_path / "more", "--write-checkpoint", tmp_path / "no"]
    call(*SHORT, "--init", tmp_path / "out", *more, model=tuned).refused(
        "neither --model", "draftless check --restore-mtp"
    )


def test_a_written_checkpoint_that_cannot_be_is_refused_before_the_training(
    call: Call, place: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    call("--write-checkpoint", new).refused("--write-checkpoint is not for medusa heads; leave it out")
    call(*SHORT, "--write-checkpoint", new).refused("--write-checkpoint needs --init: the model's checkpoint")
    call(*SHORT, "--init", place, "--write-checkpoint", place).refused(f"--write-checkpoint {place} is not empty")
    call(*SHORT, "--init", place, "--write-checkpoint", tmp_path / "out").refused("is the folder of --out or --cache")
    assert not new.exists() and not (tmp_path / "out").exists()


def test_a_lost_module_is_restored(place: Path, tuned: Path, tmp_path: Path, run_main: Call) -> None:
    out = tmp_path / "out"
    options = ["--model", tuned, "--out", out]
    run = run_main(check.main, "--restore-mtp", place, *options)
    assert (run.status, run.out) == (0, f"{out} is {tuned} with the MTP module of {place}\n")
    torch.testing.assert_close(read_checkpoint(out).modules, read_checkpoint(place).modules, rtol=0, atol=0)

    def refuse(*given: str | Path, message: str) -> None:
        run_main(check.main, *given).refused(message)

    refuse("--restore-mtp", place, *options, message=f"--out {out} is not empty; give another folder")
    refuse("--restore-mtp", place, "--model", place, "--out", tmp_path / "new", message="has an MTP module already")
    refuse("--restore-mtp", tuned, "--model", tuned, "--out", tmp_path / "new", message="tuned has no MTP module")
    refuse("--restore-mtp", place, "--model", tuned, message="needs --model, the fine-tuned checkpoint, and --out")
    refuse("--restore-mtp", place, *options, "--serve", message="--restore-mtp takes --model and --out alone")
    refuse("--restore-mtp", place, *options, "--json", message="--restore-mtp takes --model and --out alone")
    refuse("--restore-mtp", "a/b/c", *options[:2], "--out", tmp_path / "new", message="a/b/c is no folder of a")
    refuse(place, *options, message="--out is for --restore-mtp")
    refuse(place, "--restore-mtp", place, message="not allowed with argument")
    assert not (tmp_path / "new").exists()


def test_checkpoints_of_the_hub_are_found(
    place: Path, tuned: Path, tmp_path: Path, run_main: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they lie in the cache, where files are links."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commit, stored = "0" * 40, tmp_path / "hub" / "models--me--base"
    for part in ("refs", "blobs", f"snapshots/{commit}"):
        (stored / part).mkdir(parents=True)
    (stored / "refs" / "main").write_text(commit)
    for file in place.iterdir():
        shutil.copyfile(file, stored / "blobs" / file.name)
        (stored / "snapshots" / commit / file.name).symlink_to(stored / "blobs" / file.name)
    run = run_main(check.main, "--restore-mtp", "me/base", "--model", tuned, "--out", tmp_path / "out")
    assert (run.status, run.out) == (0, f"{tmp_path / 'out'} is {tuned} with the MTP module of me/base\n")
    again = run_main(check.main, "--restore-mtp", tuned, "--model", "me/base", "--out", tmp_path / "new")
    again.refused("me/base has an MTP module already")
    other = run_main(check.main, "--restore-mtp", "me/other", "--model", tuned, "--out", tmp_path / "new")
    other.refused("me/other is no folder of a checkpoint; as a hub id: ")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "glm4_moe"])
def test_vllm_drafts_with_a_trained_module(
    call: Call, make_place: Place, kind: str, tmp_path: Path, run_main: Call
) -> None:
    """As Draftless does. In the Python that DRAFTLESS_ENGINE_PYTHON names, or in this one."""
    python = os.environ.get("DRAFTLESS_ENGINE_PYTHON", sys.executable)
    try:
        check_engine(python)
    except ValueError:
        pytest.skip("no vLLM here; DRAFTLESS_ENGINE_PYTHON names a Python that has one")
    place, new, back = make_place(kind), tmp_path / "new", tmp_path / "back"
    options = ["--kind", "mtp", "--epochs", "4", "--lr", "1e-2", "--init", place, "--write-checkpoint", new]
    assert call(*options, model=place).status == 0
    tuned = lose(place, tmp_path / "tuned")
    assert run_main(check.main, "--restore-mtp", new, "--model", tuned, "--out", back).status == 0
    shutil.copyfile(new / "config.json", back / "config.json")  # transformers names MiMo's architecture Qwen2

    prompts, tokens = [walk(start, 5) for start in (10, 20, 50, 80)], 36
    request = {"dtype": "float32", "prompts": prompts, "stop_ids": [], "max_new_tokens": tokens, "draft_tokens": 1}
    method = {"method": "mtp", "num_speculative_tokens": 1}
    plain, untrained, trained, restored = (
        ask_engine(python, request | {"model": str(folder), "speculation": speculation})
        for folder, speculation in ((place, None), (place, method), (new, method), (back, method))
    )
    assert plain.tokens == untrained.tokens == trained.tokens == restored.tokens
    assert (restored.drafts, restored.accepted) == (trained.drafts, trained.accepted)
    assert untrained.tokens_per_draft < 1.2 and trained.tokens_per_draft > 1.6

    target = Target.load(new, dtype="float32", accelerate="off")
    chains = load_proposer("mtp", target, depth=1, width=1, nodes=2)
    answers = decode.generate(target, prompts, chains, max_new_tokens=tokens, stop_ids=[])
    assert [answer.tokens for answer in answers] == trained.tokens
    accepted = sum(answer.stats.accepted_by_depth[0] for answer in answers)
    assert accepted == pytest.approx(trained.accepted[0], abs=4)  # vLLM's last drafts are whole ones
