"""What can be known to be wrong before a model is loaded is refused before, by each command: loading takes a minute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from decode import Target
from draftless_commands import bench, calibrate, check, distill, generate, train
from heads.checkpoint import save_head
from tests.support.commands import Call, write_rows
from tests.support.drafting import make_head
from tests.support.models import tiny

OWN = """
class Mine:
    layers = ()

    def propose(self, step, budget): ...


class Idle: ...
"""
GENERATE, DISTILL = ["--prompt", "x"], ["prompts.jsonl", "--out", "out.jsonl"]
BENCH = ["--questions", "prompts.jsonl", "--methods"]
TRAIN = ["--data", "answers.jsonl", "--out", "out", "--kind"]
CALIBRATE = ["--prompt-file", "prompts.jsonl"]
NO_HEAD = "holds none of medusa_lm_head.safetensors"
NO_MODEL = "cannot load a model from 'empty': "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("door")
    target = Target(tiny("llama"))
    for kind in ("medusa", "hydra", "eagle3"):
        save_head(make_head(kind, target), root / kind)
    (root / "empty").mkdir()
    (root / "own.py").write_text(OWN)
    write_rows(root / "prompts.jsonl", [{"prompt": "x"}])
    write_rows(root / "answers.jsonl", [{"prompt": f"x{n}", "response": "y"} for n in range(20)])
    write_rows(root / "questions.jsonl", [{"text": "x"}] * 9 + [{"prompt": "x", "response": "y"}])
    return root


@pytest.fixture
def call(folder: Path, monkeypatch: pytest.MonkeyPatch, run_main: Call) -> Call:
    """Runs a command where no model can be loaded."""
    monkeypatch.chdir(folder)
    AcceleratorState._reset_state(reset_partial_state=True)  # of a training in an earlier test
    for loader in ("Target.load", "load_model", "load_draft_model"):
        fail = lambda *given, **settings: pytest.fail("a model was loaded")  # noqa: E731
        monkeypatch.setattr(f"draftless_commands.shared.options.{loader}", fail)
    return lambda script, *arguments: run_main(script.main, *arguments)


WRONG: list[tuple[Any, list[str], str]] = [
    (generate, [*GENERATE, "--proposer", "own.py:Yours"], "own.py has no class Yours; it has Mine, Idle"),
    (generate, [*GENERATE, "--proposer", "medusa", "--head", "hydra"], "the head in hydra is of kind hydra"),
    (generate, [*GENERATE, "--proposer", "draft", "--draft-model", "empty"], NO_MODEL),
    (
        generate,
        [*GENERATE, "--proposer", "draft", "--draft-model", "empty", "--draft-proposer", "oak"],
        "proposer 'oak'",
    ),
    (generate, [*GENERATE, "--store", "nowhere/store"], "--store nowhere/store cannot be written"),
    (generate, [*GENERATE, "--store", "own.py"], "own.py is no answer store"),
    (generate, ["--prompt-file", "questions.jsonl"], 'line 1: a line is a JSON object with one of "prompt", "turns"'),
    (distill, [*DISTILL, "--proposer", "oak"], "unknown proposer 'oak'"),
    (distill, [*DISTILL, "--proposer", "empty"], NO_HEAD),
    (bench, [*BENCH, "own.py:Yours"], "own.py has no class Yours"),
    (bench, [*BENCH, "merged:draft_model=empty"], NO_MODEL),
    (bench, [*BENCH, "merged:store=x"], "merged:store=x: a store is not read here; warm=true keeps answers"),
    (bench, [*BENCH, "hf:num_beam=2"], "hf:num_beam=2: transformers' generate has no setting num_beam"),
    (bench, [*BENCH, "ngram,telepathy"], "unknown proposer 'telepathy'; choose from none, ngram"),
    (bench, [*BENCH, "nodes=8"], "--methods begins with the option 'nodes=8'"),
    (bench, [*BENCH, "ngram:warm=true", "--repeats", "1"], "warm is for suffix, merged and auto"),
    (bench, [*BENCH, "merged:warm=true"], "give --repeats 1"),
    (bench, [*BENCH, "hf", "--batch-size", "2"], "hf answers one question at a time"),
    (bench, [*BENCH, "none", "--json", "no/such/out.json"], "--json no/such/out.json cannot be written"),
    (bench, [*BENCH, "none", "--from", "out.json"], "not allowed with argument"),
    (bench, [*BENCH, "none", "--llama-bench", "x"], "--llama-bench is not for --questions"),
    (bench, ["--from", "out.json", "--limit", "2"], "--limit is not for --from"),
    (check, ["hydra", "--engine-python", "python3"], "--engine-python is for --serve"),
    (bench, ["--passes", "--batch-size", "2"], "--batch-size is not for --passes"),
    (bench, ["--passes", "--dtype", "bfloat16", "--gguf", "x"], "--gguf and --dtype need each other"),
    (bench, ["--first-hour", "own.py/out"], "--first-hour own.py/out cannot be written: own.py is no folder"),
    (train, [*TRAIN, "flashmap"], "flashmap heads cannot be trained here; choose from medusa, multi-token"),
    (train, [*TRAIN, "medusa", "--init", "empty"], NO_HEAD),
    (train, [*TRAIN, "medusa", "--init", "hydra"], "--init hydra holds a head of kind hydra, not medusa"),
    (train, [*TRAIN, "draft", "--init", "empty"], NO_MODEL),
    (train, [*TRAIN, "medusa", "--cache", "own.py"], "--cache own.py is a file; give a folder"),
    (train, [*TRAIN, "medusa", "--out", "own.py/out"], "--out own.py/out cannot be written: own.py is no folder"),
    (train, [*TRAIN, "medusa", "--data", "questions.jsonl"], "9 of 10 rows cannot be trained on: questions.jsonl"),
    (calibrate, [*CALIBRATE, "--head", "empty"], NO_HEAD),
    (calibrate, [*CALIBRATE, "--draft-model", "empty"], NO_MODEL),
    (calibrate, ["--head", "medusa", "--prompt-file", "questions.jsonl"], "questions.jsonl, line 1: a line is a JSON"),
    (check, ["hydra", "--export", "wide"], "--export is for Medusa heads; hydra has a head of kind hydra"),
    (check, ["medusa", "--export", "own.py"], "--export own.py is a file; give a folder"),
]


@pytest.mark.parametrize(("script", "arguments", "message"), WRONG)
def test_it_is_refused_in_one_line(call: Call, script: Any, arguments: list[str], message: str) -> None:
    call(script, *arguments).refused(message)


def test_a_folder_without_a_head_is_reported(call: Call, folder: Path) -> None:
    run = call(check, "empty")
    assert (run.status, run.err) == (1, "") and run.out.startswith("error   draftless does-not-load: ")
    assert NO_HEAD in run.out and not (folder / "wide").exists()


def test_peagle_heads_begin_with_eagle3_heads(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one kind that another one may become; so the model is loaded."""
    loaded: Callable[..., Any] = lambda *given, **settings: (_ for _ in ()).throw(ValueError("loaded"))  # noqa: E731
    monkeypatch.setattr("draftless_commands.shared.options.Target.load", loaded)
    call(train, *TRAIN, "peagle", "--init", "eagle3").refused("draftless train: error: loaded")
