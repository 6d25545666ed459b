"""Model cards, uploads, and how far an adapter has moved its model: what `draftless check` does in addition."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from safetensors.torch import load_file

from decode import Target
from decode.models.adapters import ADAPTER, BASE
from draftless_commands import check
from draftless_commands.checking.card import CARD, MARK
from draftless_commands.checking.drift import answer_without_adapter, measure_drift, score
from draftless_commands.shared.options import ModelOptions
from heads import save_head
from tests.support.commands import Call
from tests.support.drafting import make_head
from tests.support.models import tiny
from tests.support.published_heads import write
from training.checkpoint import CHECKPOINT
from training.joint import Adapters

RECORD = {
    "command": "draftless train --kind eagle3 --init first --data a.jsonl --out my-head",
    "data": ["a.jsonl"],
    "examples": 1200,
    "answer_tokens": 90000,
    "held_out_prompts": 24,
    "continued": True,
}
METRICS = [{"step": 2, "tokens": 500, "loss": 3.0}, {"step": 2, "tokens": 500, "tau": 1.4}]
METRICS += [{"step": step, "tokens": 500 * step, "tau": 2.5 - step / 10} for step in (4, 6)]


@pytest.fixture(scope="module")
def model(save_model: Callable[..., Path]) -> Path:
    return save_model(dtype=torch.float32)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """An EAGLE-3 head of a model on the hub, with the records of its training."""
    folder = tmp_path / "my-head"
    save_head(make_head("eagle3", Target(tiny("llama")), draft_size=40, target_name="org/model"), folder)
    (folder / "training.json").write_text(json.dumps(RECORD))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    (folder / CHECKPOINT).write_bytes(b"large")
    return folder


@pytest.fixture
def call(model: Path, run_main: Call) -> Call:
    return lambda *arguments: run_main(check.main, *arguments, "--model", model)


def test_a_card_has_what_is_known(call: Call, head: Path) -> None:
    report = json.loads(call(head, "--json", "--card").out)
    text = (head / CARD).read_text()
    metadata = "base_model: org/model\nlibrary_name: draftless\ntags:\n- draftless\n- speculative-decoding\n- eagle3\n"
    assert text.startswith(f"---\n{metadata}---\n\n{MARK}\n\n# my-head: eagle3 head for org/model\n")
    assert "Data: a.jsonl; 1,200 examples with 90,000 answer tokens, and 24 prompts held out." in text
    assert "It began as another head" in text and f"```sh\n{RECORD['command']}\n```" in text
    assert "It has seen 2,000 answer tokens" in text and "was 2.10 in trees of 16 nodes" in text
    low, high = report["tau_interval"]
    assert low <= report["tau"] <= high and f"{report['tau']:.2f} [{low:.2f}, {high:.2f}]" in text
    assert len(report["by_prompt"]) == 4 and all(f"| {prompt[:40]}" in text for prompt in report["by_prompt"])
    assert "| draft vocabulary " in text and "draftless generate --head my-head --prompt" in text
    assert "vllm serve org/model --speculative-config" in text and '"model": "my-head"' in text
    assert "--model-path org/model --speculative-algorithm EAGLE3 --speculative-draft-model-path my-head" in text
    assert str(head.parent) not in text and "license" not in text and "hf download" not in text
    assert "None" not in text


def test_a_card_has_nothing_else(call: Call, tmp_path: Path, model: Path) -> None:
    """The folder of a head alone, of a kind that no server has, for a local model."""
    save_head(make_head("hydra", Target(tiny("llama"))), tmp_path / "bare")
    assert call(tmp_path / "bare", "--card", "--no-decode").status == 0
    text = (tmp_path / "bare" / CARD).read_text()
    assert text.startswith("---\nlibrary_name") and "# bare: hydra head\n" in text
    assert "has no record of the data and the command" in text and "tau" not in text.lower()
    assert "draftless generate --model MODEL --head bare" in text and str(model) not in text
    assert "vLLM has no class for hydra heads." in text and "SGLang has no class for hydra heads." in text


def test_only_a_card_of_ours_is_replaced(call: Call, head: Path) -> None:
    (head / CARD).write_text("My own page.")
    call(head, "--card").refused("was not written by draftless check --card, so it is kept")
    assert (head / CARD).read_text() == "My own page."
    (head / CARD).write_text(f"{MARK} an older one")
    assert call(head, "--card", "--no-decode").status == 0
    assert "an older one" not in (head / CARD).read_text()


def test_faults_keep_a_server_off_the_card(call: Call, tmp_path: Path) -> None:
    save_head(make_head("medusa", Target(tiny("llama")), draft_size=20), tmp_path / "narrow")
    (tmp_path / "narrow" / "training.json").write_text(json.dumps(RECORD))
    call(tmp_path / "narrow", "--card", "--no-decode")
    text = (tmp_path / "narrow" / CARD).read_text()
    assert "It is not for vLLM as it is:\n- vLLM 0.21 to 0.32 needs all rows" in text
    call(tmp_path / "narrow", "--card", "--no-decode", "--export", tmp_path / "wide")
    text = (tmp_path / "wide" / CARD).read_text()
    assert "vllm serve MODEL" in text and "Data: a.jsonl" in text, "the record is that of the head"


class Hub:
    """In place of `HfApi`: what is called, and what fails."""

    def __init__(self, **errors: Exception) -> None:
        self.errors, self.calls = errors, list[tuple[str, tuple[Any, ...], dict[str, Any]]]()

    def __getattr__(self, name: str) -> Any:
        def answer(*given: Any, **named: Any) -> str:
            self.calls.append((name, given, named))
            if name in self.errors:
                raise self.errors[name]
            return "https://hub/me/head"

        return answer


def test_a_head_is_uploaded_with_its_card(call: Call, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    run = call(head, "--card", "--push-to-hub", "me/head", "--no-decode")
    assert run.status == 0 and f"{head} is uploaded to https://hub/me/head" in run.err
    (_, _, _), (_, made, _), (_, _, given) = hub.calls
    assert [name for name, *_ in hub.calls] == ["whoami", "create_repo", "upload_folder"] and made == ("me/head",)
    files = [file.relative_to(head).as_posix() for file in head.rglob("*")]
    sent = {*huggingface_hub.utils.filter_repo_objects(files, allow_patterns=given["allow_patterns"])}
    assert sent == {"config.json", "model.safetensors", "README.md", "metrics.jsonl", "training.json"}
    text = (head / CARD).read_text()
    assert "hf download me/head --local-dir my-head\ndraftless generate --head my-head" in text
    assert '"model": "me/head"' in text


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ({"whoami": LocalTokenNotFoundError("Token is required")}, "needs a login: run hf auth login"),
        ({"whoami": ConnectionError("no route\nmore")}, "me/head: the hub cannot be reached: no route"),
        ({"upload_folder": HfHubHTTPError("403 Forbidden", response=MagicMock())}, "the hub refuses it: 403"),
    ],
)
def test_what_goes_wrong_at_the_hub(
    call: Call, head: Path, monkeypatch: pytest.MonkeyPatch, errors: dict[str, Exception], message: str
) -> None:
    hub = Hub(**errors)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    call(head, "--push-to-hub", "me/head", "--no-decode").refused(message)
    assert [name for name, *_ in hub.calls][-1] == next(iter(errors))


def test_what_cannot_be_uploaded(call: Call, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("the hub was asked"))
    call(head, "--push-to-hub", "head").refused("with its owner, USER/NAME")
    call(head, "--push-to-hub", "me/no head").refused("Repo id must use alphanumeric chars")
    (head / "adapter").mkdir()
    (head / "adapter" / ADAPTER).write_text(json.dumps({BASE: str(head)}))
    call(head, "--push-to-hub", "me/head").refused("names its base model by a path of this machine")
    write(head, "model.safetensors", load_file(head / "model.safetensors"), {})
    call(head, "--push-to-hub", "me/head").refused("is for heads that Draftless saved")
    (head / "config.json").write_text(json.dumps({"target_weights": "x"}))
    call(head, "--push-to-hub", "me/head").refused("is for heads; a draft model is a model of transformers")


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Medusa head's folder with the adapter that it belongs to."""
    folder = tmp_path_factory.mktemp("pair")
    target = Target.load(model, accelerate="off")
    save_head(make_head("medusa", target), folder)
    adapters = Adapters(target, str(model), rank=4)
    generator = torch.Generator().manual_seed(3)
    for weight in adapters.weights:
        weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
    adapters.save(folder / "adapter")
    return folder


def test_the_perplexity_of_the_originals_answers(pair: Path, model: Path) -> None:
    """As a plain forward pass over each answer has it."""
    original, adapted = Target.load(model, accelerate="off"), Target.load(pair / "adapter", accelerate="off")
    answers = answer_without_adapter(ModelOptions(str(pair / "adapter"), accelerate="off"), 12)
    assert len(answers) == 4 and all(0 < len(each.tokens) <= 12 for each in answers)
    means = []
    for target in (original, adapted):
        total = 0.0
        for each in answers:
            ids = torch.tensor([[*each.prompt, *each.tokens]])
            with torch.no_grad():
                logs = target.model(input_ids=ids).logits[0].log_softmax(dim=-1)
            expected = -float(sum(logs[len(each.prompt) - 1 + at, token] for at, token in enumerate(each.tokens)))
            assert score(target, each.prompt, each.tokens) == pytest.approx(expected, rel=1e-4)
            total += expected
        means.append(math.exp(total / sum(len(each.tokens) for each in answers)))
    drift = measure_drift(answers, adapted)
    assert [drift.original, drift.adapted, drift.ratio] == pytest.approx([*means, means[1] / means[0]], rel=1e-4)
    low, high = drift.interval
    assert 1 < low < drift.ratio < high
    same = measure_drift(answers, original)
    assert same.ratio == 1 and same.interval == (1, 1)


def test_check_reports_the_drift_of_an_adapter(pair: Path, run_main: Call) -> None:
    """Without --model, it is the adapter in the head's folder."""
    run = run_main(check.main, pair, "--card")
    (line,) = [line for line in run.out.splitlines() if line.startswith("perplexity of the original model's answers: ")]
    assert "of 4 prompts, greedy, 95 % interval)" in line
    text = (pair / CARD).read_text()
    assert line[1:] in text and "its model with an adapter verifies" in text
    assert "draftless generate --head" in text and "--model MODEL" not in text and str(pair) not in text
    (pair / CARD).unlink()
    report = json.loads(run_main(check.main, pair, "--json", "--no-decode").out)
    assert report["drift"] is None and report["target"] == str(pair / "adapter")
