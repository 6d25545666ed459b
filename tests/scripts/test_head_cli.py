"""Heads on the command line: generate, bench and the demo with heads, and calibrate."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode import Target
from draftless_commands import bench, calibrate, check, generate, serve
from draftless_commands.shared import options
from draftless_commands.shared.options import DEFAULT_MODEL, ModelOptions, find_model
from heads import PRETRAINED
from heads.checkpoint import read_target, save_head
from proposers import AnswerStore, MergedProposer, NGramProposer
from proposers.calibration import FILE, load_calibration
from tests.support.commands import Call, Run, write_rows
from tests.support.drafting import make_head
from tests.support.models import tiny

PROMPTS = ["ab ab ab", "Tell me.", "one two"]
BASE = ["--model", "target", "--dtype", "float64"]
ASK = [*BASE, "--prompt-file", "prompts.jsonl", "--max-new-tokens", "12", "--json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, save_model: Callable[..., Path]) -> Path:
    root = tmp_path_factory.mktemp("heads")
    (root / "target").symlink_to(save_model())
    (root / "wide-target").symlink_to(save_model(hidden_size=48))
    target = Target(tiny("llama"))
    save_head(make_head("medusa", target, output="own"), root / "medusa")
    save_head(make_head("hydra", target, prefix=True), root / "hydra")
    for kind in ("eagle3", "multi-token", "mtp"):
        save_head(make_head(kind, target), root / kind)
    save_head(make_head("medusa", Target(tiny("llama", hidden_size=48))), root / "wide")
    save_head(make_head("medusa", target), root / "spoilt")
    for name, model in (("named", "target"), ("lost", "no/such-model"), ("other", "wide-target"), ("unnamed", None)):
        save_head(make_head("medusa", target, target_name=model), root / name)
    (root / "spoilt" / FILE).write_text("{}")
    write_rows(root / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    questions = [{"question_id": number, "category": "qa", "turns": [text]} for number, text in enumerate(PROMPTS)]
    write_rows(root / "questions.jsonl", questions)
    return root


@pytest.fixture
def call(folder: Path, monkeypatch: pytest.MonkeyPatch, run_main: Call) -> Call:
    monkeypatch.chdir(folder)
    return lambda script, *arguments: run_main(script.main, *arguments)


def read_tokens(run: Run) -> list[list[int]]:
    assert (run.status, run.err) == (0, "")
    return [row["tokens"] for row in run.rows]


NODES, CHAIN = ["--nodes", "9"], ["--depth", "3", "--width", "1", "--nodes", "4"]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("medusa", []), ("medusa", NODES), ("hydra", []), ("hydra", NODES), ("eagle3", []), ("eagle3", CHAIN)],
)
def test_a_head_does_not_change_the_text(call: Call, kind: str, settings: list[str]) -> None:
    plain = read_tokens(call(generate, *ASK, "--proposer", "none"))
    for size in ("1", "3"):
        for name in (kind, "auto") if not settings else (kind,):
            drafted = call(generate, *ASK, "--proposer", name, "--head", kind, "--batch-size", size, *settings)
            assert read_tokens(drafted) == plain


def test_typical_acceptance_says_that_it_is_lossy(call: Call) -> None:
    ask = [*ASK, "--temperature", "1", "--seed", "3", "--proposer", "medusa", "--head", "medusa"]
    assert read_tokens(call(generate, *ask, "--lossy-typical-acceptance")) != read_tokens(call(generate, *ask))


DRAFTING = ["--prompt", "x", "--proposer", "medusa"]


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (generate, [*DRAFTING, "--head", "wide"], "hidden size is 48; this target's is 32"),
        (generate, [*DRAFTING, "--head", "spoilt"], "calibration.json is no calibration (lacks 'acceptance')"),
        (calibrate, ["--prompt-file", "prompts.jsonl", "--head", "wide"], "hidden size is 48; this target's is 32"),
        (calibrate, ["--head", "medusa", "--prompt-file", "missing.jsonl"], "missing.jsonl: No such file"),
    ],
)
def test_bad_heads_are_refused_in_one_line(call: Call, script: Any, arguments: list[str], message: str) -> None:
    call(script, *BASE, *arguments).refused(message)
    assert not list(Path("medusa").glob("*calibration*"))


def test_auto_is_the_default_and_needs_no_head(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = generate.make_proposer
    monkeypatch.setattr(generate, "make_proposer", lambda *given: made.append(make(*given)) or made[-1])
    assert read_tokens(call(generate, *ASK, "--proposer", "ngram")) == read_tokens(call(generate, *ASK))
    assert [type(proposer) for proposer in made] == [NGramProposer, MergedProposer] and made[1].drafter is None


def test_a_store_is_kept_in_its_file(call: Call, folder: Path) -> None:
    first = read_tokens(call(generate, *ASK, "--store", "answers"))
    store = AnswerStore()
    store.load(folder / "answers")
    kept = [tokens for tokens in first if len(tokens) > 1]  # an answer of one token was never drafted for
    assert list(store.answers()) == kept
    assert read_tokens(call(generate, *ASK, "--store", "answers")) == first
    store.load(folder / "answers")
    assert len(store) == 2 * sum(map(len, kept))
    (folder / "answers").write_bytes(b"other")
    call(generate, *ASK, "--store", "answers").refused("answers is no answer store, or damaged")
    assert (folder / "answers").read_bytes() == b"other"
    (folder / "answers").unlink()


def test_bench_measures_heads_with_options(call: Call, folder: Path) -> None:
    ask = [*BASE, "--questions", "questions.jsonl", "--repeats", "1", "--max-new-tokens", "6"]
    names = "medusa:head=medusa,hydra:head=hydra,nodes=3,eagle3:head=eagle3,depth=2,width=1,merged:head=hydra"
    status, out, _ = call(bench, *ask, "--json", "report.json", "--methods", names)
    report = json.loads((folder / "report.json").read_text())
    assert status == 0 and "| eagle3:head=eagle3,depth=2,width=1 " in out and not report["differences"]
    rows = {row["method"]: row for row in report["rows"] if row["category"] == "all"}
    assert rows["hydra:head=hydra,nodes=3"]["nodes_per_step"] <= 2
    assert set(rows["merged:head=hydra"]["accepted"]) == {"suffix", "recycling", "grammar", "hydra"}
    call(bench, *ask, "--methods", "medusa").refused("pass a head that was trained for this target")
    call(bench, *ask, "--methods", "medusa:head=hydra").refused("is of kind hydra, not medusa")


@pytest.mark.parametrize("kind", ["medusa", "multi-token", "hydra", "eagle3", "mtp"])
def test_calibrate_writes_to_the_heads_folder(call: Call, folder: Path, kind: str) -> None:
    ask = [*BASE, "--head", kind, "--prompt-file", "prompts.jsonl", "--max-new-tokens", "20"]
    status, out, _ = call(calibrate, *ask, "--limit", "2")
    assert status == 0
    calibration = load_calibration(kind)
    assert calibration is not None and calibration.positions[0] in range(2, 39)
    shown, _, verdict = out.rstrip().rpartition("\n")
    assert shown == calibrate.describe(calibration, 2)
    assert re.fullmatch(r"worth it here: .* \(.*\d+ tokens? of 2 prompts.*\)", verdict)
    plain = read_tokens(call(generate, *ASK, "--proposer", "none"))
    assert read_tokens(call(generate, *ASK, "--proposer", kind, "--head", kind)) == plain
    (folder / kind / FILE).unlink()


def test_calibrate_asks_the_questions_of_distilled_answers(call: Call, folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "response": "yes", "token_ids": [[[5], [6]]]} for prompt in PROMPTS]
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": None}]
    rows = [{"prompt": "dropped", "dropped": "loop"}, *rows, {"messages": talk}]
    write_rows(tmp_path / "answers.jsonl", rows)
    write_rows(tmp_path / "alone.jsonl", [{"prompt": prompt} for prompt in (*PROMPTS, "ab")])
    ask = [*BASE, "--head", "spoilt", "--max-new-tokens", "8", "--prompt-file"]
    shown = [call(calibrate, *ask, str(tmp_path / file))[:2] for file in ("answers.jsonl", "alone.jsonl")]
    (status, out), (_, other) = shown
    assert status == 0 and out.partition("worth it here")[0] == other.partition("worth it here")[0]


ALONE = ["--dtype", "float64", "--prompt-file", "prompts.jsonl", "--max-new-tokens", "12"]
EACH: list[tuple[Any, list[str]]] = [
    (generate, [*ALONE, "--head"]),
    (generate, [*ALONE, "--proposer"]),
    (calibrate, [*ALONE, "--head"]),
    (check, ["--no-decode", "--dtype", "float64"]),
    (serve, ["--port", "0", "--head"]),
    (bench, ["--dtype", "float64", "--questions", "questions.jsonl", "--repeats", "1", "--methods"]),
]


@pytest.mark.parametrize(("script", "arguments"), EACH)
def test_a_head_names_its_model(
    call: Call, script: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Without --model it is loaded; what cannot be found is said before anything is."""
    loaded = list[str | None]()
    load = script.load_target
    monkeypatch.setattr(script, "load_target", lambda options: loaded.append(options.model) or load(options))
    monkeypatch.setattr(serve, "run", lambda *_: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it is asked five times
    assert call(script, *arguments, "named").status == 0 and loaded == ["target"]
    call(script, *arguments, "lost").refused("cannot load a model from 'no/such-model'", "give --model if it is")
    call(script, *arguments, "unnamed").refused("the head in unnamed does not name the model that it was trained for")
    assert loaded == ["target"]
    (folder / "named" / FILE).unlink(missing_ok=True)


def test_heads_of_several_models_need_one(call: Call) -> None:
    ask = ["--dtype", "float64", "--questions", "questions.jsonl", "--repeats", "1", "--methods", "named,other"]
    call(bench, *ask).refused("several models: named for target, other for wide-target; give --model")
    assert call(bench, *ask, *BASE[:2], "--limit", "1").status == 0


def test_which_model_a_head_is_for(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(folder)
    assert [find_model(PRETRAINED / kind) for kind in ("medusa", "hydra", "eagle", "eagle3")] == [None] * 4
    target = Target(tiny("llama"))
    save_head(make_head("medusa", target, target_name="gone", target_weights="210dbf7a38725ae1"), tmp_path / "named")
    assert find_model(tmp_path / "named") is None  # the default model, by its weights
    (tmp_path / "named" / "adapter").mkdir()
    (tmp_path / "named" / "adapter" / "adapter_config.json").write_text("{}")
    assert find_model(tmp_path / "named") == str(tmp_path / "named" / "adapter")  # of Medusa-2
    unnamed = replace(read_target(PRETRAINED / "medusa"), target_name=None, target_weights="of a fine-tuned copy")
    monkeypatch.setattr(options, "read_target", lambda place: unnamed if place == tmp_path else read_target(place))
    with pytest.raises(ValueError, match="does not name the model that it was trained for; give --model"):
        find_model(tmp_path)
    names = [ModelOptions(model).public_name for model in (None, "org/model", "target", str(folder / "target"))]
    assert names == [DEFAULT_MODEL, "org/model", None, None]
