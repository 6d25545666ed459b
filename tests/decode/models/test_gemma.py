"""A second real model in every command: windows of 512 tokens, 262,144 tokens, no chat template."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import scripts.calibrate
import scripts.check
from decode import Target, generate
from heads import load_head
from tests.support.gemma import gemma
from tests.support.training_runs import train

pytestmark = pytest.mark.slow
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    if n < 2:\n        return n\n"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return gemma()


def test_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    target = Target.load(str(folder), dtype="float32")
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = generate(target, PROMPTS, None, max_new_tokens=16)
    for answer in plain:
        ids = torch.tensor([answer.prompt])
        expected = stock.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
        assert answer.tokens == expected
    for proposer in ("ngram", "merged"):
        drafted = generate(target, PROMPTS, proposer, max_new_tokens=16)
        assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain], proposer


@pytest.mark.parametrize("accelerate", ["off", "packed"])
def test_bfloat16_is_accepted(folder: Path, accelerate: str) -> None:
    target = Target.load(str(folder), dtype="bfloat16", accelerate=accelerate)
    (answer,) = generate(target, PROMPTS[0], "ngram", max_new_tokens=16)
    assert len(answer.tokens) == 16 and "France" in answer.text


@pytest.fixture(scope="module")
def place(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's files, and answers to train on."""
    place = tmp_path_factory.mktemp("gemma")
    for file in folder.iterdir():
        (place / file.name).symlink_to(file)
    rows = [{"prompt": f"The number {number} is", "response": f" one more than {number - 1}."} for number in range(20)]
    (place / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle", "eagle3"])
def test_a_head_is_trained_calibrated_and_checked(
    place: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With defaults a head drafts a part of the vocabulary."""
    out = tmp_path / "head"
    assert train(place, out, "--kind", kind, "--max-steps", "1", "--validation", "1") == 0
    assert "a step" in capsys.readouterr().out
    head = load_head(out)
    assert head.kind == kind and head.draft_size == 8192
    assert (out / "model.safetensors").stat().st_size < 60e6
    model = ["--model", str(place), "--dtype", "bfloat16"]
    prompts = ["--prompt-file", str(place / "answers.jsonl"), "--limit", "1", "--max-new-tokens", "8"]
    scripts.calibrate.main(["--head", str(out), *prompts, *model])
    assert (out / "calibration.json").exists()
    with suppress(SystemExit):
        scripts.check.main([str(out), *model])
    errors = set(re.findall(r"^error +\w+ +([\w-]+):", capsys.readouterr().out, re.MULTILINE))
    assert errors <= {"accepts-nothing", "medusa-token-map"}  # after one step; vLLM has no draft vocabulary for Medusa
