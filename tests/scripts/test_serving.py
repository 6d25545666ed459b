"""`--serve` with a fake vLLM: its table, findings and errors; and with a real one where there is one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from decode import Target, generate
from decode.models.fingerprint import fingerprint_weights
from decode.weights.gguf import description
from draftless_commands import check
from draftless_commands.checking import serving
from draftless_commands.checking.serving import NEW_TOKENS, PROMPTS, draft_chains
from heads import PRETRAINED, save_head
from tests.support.commands import Call, Run
from tests.support.drafting import make_head
from tests.support.gguf_files import write_model

LAYERS, CHAIN = 12, 3
PRETENDED = '''
"""Prints, answers from a file, or runs the code in the file."""
import json, os, subprocess, sys, time
from types import SimpleNamespace
__version__, PLACE = "9.9", os.environ["PLAN"]
PLAN = json.load(open(PLACE))

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, model, **settings):
        print("noise on stdout")
        self.drafts = settings["speculative_config"] is not None
        json.dump({"model": model, **settings}, open(f"{PLACE}.{self.drafts:d}", "w"))
        exec(PLAN["code"] if self.drafts or PLAN["always"] else "")

    def generate(self, prompts, sampling):
        assert len(prompts) == len(PLAN["plain"]) and sampling.temperature == 0
        texts = PLAN["drafted" if self.drafts else "plain"]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(text))]) for text in texts]

    def get_metrics(self):
        name = "vllm:spec_decode_num_"
        return [SimpleNamespace(name=name + "drafts", value=PLAN["drafts"]),
                SimpleNamespace(name=name + "accepted_tokens_per_pos", values=PLAN["accepted"])]
'''
SLEEP = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
json.dump([os.getpid(), child.pid], open(PLACE + ".pids", "w"))
time.sleep(600)
"""


@pytest.fixture(scope="module")
def model(save_model: Callable[..., Path]) -> Path:
    return save_model(num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def target(model: Path) -> Target:
    return Target.load(model, dtype="float32", accelerate="packed")


@pytest.fixture(scope="module")
def head(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    save_head(make_head("eagle3", target, output="target"), folder)
    return folder


@pytest.fixture(scope="module")
def agreeing(target: Target, head: Path) -> dict[str, Any]:
    """The plan of a vLLM that answers and drafts as Draftless does."""
    ours = draft_chains(head, target, CHAIN)[1]
    plain = [answer.tokens for answer in generate(target, PROMPTS, None, max_new_tokens=NEW_TOKENS)]
    found = {"drafts": ours.drafts, "accepted": ours.accepted}
    return {"plain": plain, "drafted": plain, **found, "code": "", "always": False}


@pytest.fixture
def serve(model: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_main: Call) -> Call:
    library, plan_file = tmp_path / "library", tmp_path / "plan.json"
    (library / "vllm").mkdir(parents=True)
    (library / "vllm" / "__init__.py").write_text(PRETENDED)
    monkeypatch.setenv("PYTHONPATH", str(library))
    monkeypatch.setenv("PLAN", str(plan_file))

    def run(plan: dict[str, Any], *arguments: str | Path, folder: Path = head) -> Run:
        plan_file.write_text(json.dumps(plan))
        options = ["--model", model, "--dtype", "float32", "--no-decode", "--serve"]
        return run_main(check.main, folder, *options, *arguments)

    return run


def read_table(out: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split("|") for line in out.splitlines() if line.startswith("| ")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


def test_a_head_that_is_served_as_here(serve: Call, agreeing: dict[str, Any], tmp_path: Path, model: Path) -> None:
    status, out, err = serve(agreeing)
    assert status == 0 and "served-" not in out and err.count("\n") == 1
    table, drafts = read_table(out), agreeing["drafts"]
    assert table[f"eagle3, {CHAIN} draft tokens"] == ["vLLM 9.9", "Draftless"]
    assert table["text as in vLLM without it"] == ["4 of 4"] * 2 and table["drafts"] == [str(drafts)] * 2
    for place, count in enumerate(agreeing["accepted"], start=1):
        assert table[f"accepted at position {place}"] == [f"{count / drafts:.3f}"] * 2
    tau = f"{1 + sum(agreeing['accepted']) / drafts:.2f}"
    assert table["tokens per draft, bonus token included"] == [tau, tau]
    plain, drafted = (json.loads((tmp_path / f"plan.json.{run}").read_text()) for run in (0, 1))
    assert plain["speculative_config"] is None and plain["model"] == str(model.resolve())
    assert drafted["speculative_config"]["method"] == "eagle3"
    assert drafted["speculative_config"]["num_speculative_tokens"] == CHAIN


def test_a_gguf_file_is_served_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "user_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(serving, "_serve_head", lambda *given: (AutoModelForCausalLM.from_pretrained(given[-1]), []))
    write_model("llama", tmp_path / "m.gguf")
    target = Target.load(tmp_path / "m.gguf", accelerate="packed")
    served, _ = serving.serve_head(tmp_path, "eagle3", {}, target, sys.executable)
    assert fingerprint_weights(served) == target.weights_fingerprint


def test_each_draft_is_counted_once(target: Target, head: Path, agreeing: dict[str, Any]) -> None:
    """Drafts begin after the prefill's token and before the last wanted one. Each adds its accepted tokens and one."""
    ours = draft_chains(head, target, CHAIN)[1]
    assert ours.tokens == agreeing["plain"] and max(map(len, ours.tokens)) == NEW_TOKENS
    spare = ours.drafts + sum(ours.accepted) - sum(len(text) - 1 for text in ours.tokens)
    assert 0 <= spare < len(PROMPTS), "only an answer's last draft may go beyond its end, and few drafts are accepted"


def test_other_texts_are_a_warning_and_fewer_accepted_tokens_an_error(serve: Call, agreeing: dict[str, Any]) -> None:
    other = [[*agreeing["plain"][0][:-1], 0], *agreeing["plain"][1:]]
    status, out, _ = serve(agreeing | {"drafted": other})
    assert status == 0 and "warning vllm      served-text-differs: 1 of 4 texts differ" in out
    assert read_table(out)["text as in vLLM without it"] == ["3 of 4", "4 of 4"]
    assert sum(agreeing["accepted"]) > 0
    status, out, _ = serve(agreeing | {"accepted": [0] * CHAIN, "drafts": 380}, "--json")
    report = json.loads(out)
    assert status == 1 and [each["name"] for each in report["findings"]] == ["served-accepts-less"]
    assert report["served"]["draftless"]["accepted"] == agreeing["accepted"] and report["commands"]["vllm"] is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('no such\\n  weights: {}')", "ValueError: no such weights: {}"),
        ("print('bad luck', file=sys.stderr, flush=True); os._exit(3)", "it ended with status 3: bad luck"),
        ("os.kill(os.getpid(), 9)", "it was killed, most likely because memory ran out"),
    ],
)
def test_why_a_head_is_not_served(serve: Call, agreeing: dict[str, Any], code: str, reason: str) -> None:
    status, out, _ = serve(agreeing | {"code": code})
    line = f"error   vllm      engine-refuses: vLLM 9.9 serves the model, but not with this head: {reason}"
    assert status == 1 and line in out.splitlines() and "Draftless |" not in out
    out = serve(agreeing | {"code": code, "always": True})[1]
    assert f"engine-fails: vLLM does not serve the model, with this head or without it: {reason}" in out


@pytest.mark.slow
def test_nothing_goes_on_after_a_timeout(
    serve: Call, agreeing: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "TIMEOUT", 6)
    assert "it did not answer within 0.1 minutes" in serve(agreeing | {"code": SLEEP})[1]
    ends = monotonic() + 10  # a killed process may take a moment to end
    while not all(map(has_ended, json.loads((tmp_path / "plan.json.pids").read_text()))):
        assert monotonic() < ends
        sleep(0.05)


def has_ended(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return not state.exists() or state.read_text().split(") ")[1].startswith("Z")  # an orphan may stay as a zombie


def test_what_has_no_server_is_refused(
    serve: Call, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_head(make_head("hydra", target), tmp_path / "hydra")
    serve({}, folder=tmp_path / "hydra").refused("not for hydra heads")
    monkeypatch.setattr(check, "load_target", None)  # it is not called without vLLM
    shutil.rmtree(tmp_path / "library" / "vllm")
    serve({}).refused(f"--serve needs vLLM, and {sys.executable} has none; name a Python")
    serve({}, "--engine-python", tmp_path / "nowhere").refused("does not run: No such file")


def test_an_exported_head_is_served_as_a_copy(
    serve: Call, agreeing: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    save_head(make_head("medusa", target, draft_size=20), tmp_path / "narrow")
    out = serve(agreeing, "--export", tmp_path / "wide", folder=tmp_path / "narrow")[1]
    assert "medusa, 3 draft tokens" in out
    asked = json.loads((tmp_path / "plan.json.1").read_text())["speculative_config"]
    assert asked["model"] == str(tmp_path / "wide") and asked["method"] == "medusa"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_pretrained_heads_in_the_real_engine(kind: str, tmp_path: Path) -> None:
    """In the Python that DRAFTLESS_ENGINE_PYTHON names, or in this one."""
    python = os.environ.get("DRAFTLESS_ENGINE_PYTHON", sys.executable)
    try:
        serving.check_engine(python)
    except ValueError:
        pytest.skip("no vLLM here; DRAFTLESS_ENGINE_PYTHON names a Python that has one")
    options = ["--export", str(tmp_path / "wide")] if kind == "medusa" else []
    options += ["--serve", "--engine-python", python, "--no-decode", "--json"]
    command = [sys.executable, "-m", "draftless_commands.check", str(PRETRAINED / kind), *options]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr + run.stdout
    served = json.loads(run.stdout)["served"]
    vllm, here = served["vllm"], served["draftless"]
    assert vllm["tokens"] == here["tokens"] == served["plain"]["tokens"]
    assert vllm["drafts"] == pytest.approx(here["drafts"], abs=4)  # EAGLE-1 drafts from the whole vocabulary in vLLM
    assert vllm["accepted"] == pytest.approx(here["accepted"], abs=4)
