"""bench.py --gpu-report: the whole command on a CPU with tiny shapes, and what it makes of a profile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from transformers import LlamaConfig

from scripts import bench
from scripts.gpu_report import models, report
from scripts.gpu_report.bandwidth import compare_with_floor
from scripts.gpu_report.models import LARGE, Subject, count_bytes, count_read_bytes
from scripts.gpu_report.step_profile import count_step, split_time
from tests.support.models import tiny


@pytest.fixture(scope="module")
def folder(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page and the JSON of a run on the CPU."""
    folder = tmp_path_factory.mktemp("report")
    model = save_model(max_position_embeddings=400)
    bench.main(["--gpu-report", str(folder / "gpu.md"), "--device", "cpu", "--model", str(model), "--repeats", "1"])
    return folder


@pytest.mark.slow
def test_one_command_writes_a_page_and_its_json(folder: Path) -> None:
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    assert list(found) == ["settings", "machine", "tests", "models", "missing"]
    assert found["machine"]["gpu"] is None and found["machine"]["bytes_per_second"] > 1e8
    assert found["settings"] | {"commit": None} == {"dtype": "bfloat16", "repeats": 1, "commit": None}
    assert found["tests"]["skipped"] > 10 and found["tests"]["output"] == ""
    assert "tiny shape, random weights: 4096 tokens exceed its context" in found["missing"]
    named, large = found["models"]
    assert large["name"] == "tiny shape, random weights"
    for model in (named, large):
        assert [(entry["context"], entry["batch"]) for entry in model["floors"]] == [(256, 1), (256, 4), (256, 16)]
        assert [len(entry["samples_ms"]) for entry in model["passes"]] == [8] * 3
        assert [step["method"] for step in model["steps"]] == ["none", "ngram, 16 nodes"]
        assert model["steps"][0]["tau"] == 1.0 and model["steps"][0]["launches"] is None


@pytest.mark.slow
def test_the_page_has_every_table(folder: Path) -> None:
    page = (folder / "gpu.md").read_text()
    assert "No GPU: this only shows that the command works." in page
    for title in (
        "## Tests",
        "## tiny shape, random weights",
        "Milliseconds of a pass after 256 tokens",
        "floor / pass",
    ):
        assert title in page
    assert page.count("| ngram, 16 nodes") == 2 and "/tmp" not in page


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "torch sees none here" in refusal(["--gpu-report", str(tmp_path / "gpu.md")], capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu-report", "gpu.txt", "--device", "cpu"], "--gpu-report gpu.txt must end in .md"),
        (["--gpu-report", "no/such/gpu.md", "--device", "cpu"], "--gpu-report no/such/gpu.md cannot be written"),
        (["--gpu-report", "gpu.md", "--device-map", "auto"], "choose it by --device"),
        (["--gpu-report", "gpu.md", "--json", "x.json"], "--json is for others, not for --gpu-report"),
        (["--gpu-report", "gpu.md", "--plot", "x.svg"], "--plot is for others"),
        (["--gpu-report", "gpu.md", "--methods", "ngram"], "--methods is for others"),
        (["--gpu-report", "gpu.md", "--llama-bench", "x"], "--llama-bench is for others"),
        (["--gpu-report", "gpu.md", "--passes"], "not allowed with argument"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "run_tests", lambda: pytest.fail("the tests were run"))
    assert message in refusal(options, capsys)


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch, save_model: Callable[..., Path]) -> None:
    monkeypatch.setattr(models, "free_memory", lambda device: 1000)
    missing: list[str] = []
    options = models.ModelOptions(str(save_model()), device="cpu", dtype="float32")
    assert len(list(models.load_subjects(options, missing))) == 1
    assert "tiny shape, random weights: its weights take 0.0 GiB" in missing[0]


def test_the_large_shape_has_eight_billion_weights() -> None:
    assert count_bytes(LlamaConfig(**LARGE), torch.bfloat16) == 2 * 8_030_261_248


def test_a_pass_reads_all_weights_but_untied_embeddings() -> None:
    model = tiny("llama", dtype=torch.float32)
    everything = sum(parameter.nbytes for parameter in model.parameters())
    assert count_read_bytes(model) == everything - model.get_input_embeddings().weight.nbytes
    tied = tiny("llama", dtype=torch.float32, tie_word_embeddings=True)
    assert count_read_bytes(tied) == sum(parameter.nbytes for parameter in tied.parameters())


def test_a_pass_next_to_its_floor() -> None:
    entry = {"context": 100, "batch": 4, "nodes": [1, 64], "median_ms": [2.0, 3.0]}
    subject = Subject("a model", None, weight_bytes=600)  # type: ignore[arg-type]
    found = compare_with_floor(entry, subject, cache_bytes=1, bandwidth=1e6)
    assert found == {
        "context": 100,
        "batch": 4,
        "read_bytes": 1000,
        "floor_ms": 1.0,
        "pass_ms": 2.0,
        "share_of_bandwidth": 0.5,
        "tokens_per_second": 2000.0,
        "largest_over_single": 1.5,
    }


def test_a_profile_is_counted_per_step() -> None:
    def event(name: str, kind: DeviceType, start: float = 0, end: float = 0) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=end))

    host = ["cudaLaunchKernel"] * 5 + ["cuLaunchKernelEx", "cudaMemcpyAsync", "cudaStreamSynchronize", "aten::add"]
    kernels = [(0, 100), (50, 200), (400, 1000), (1200, 2000)]
    events = [event(name, DeviceType.CPU) for name in host]
    events += [event("kernel", DeviceType.CUDA, *span) for span in kernels]
    found = count_step(events, steps=2, on_gpu=True)
    assert found == {"launches": 3.0, "copies": 0.5, "waits": 0.5, "busy_ms": 0.8, "gaps_ms": 0.2}
    assert split_time([]) == (0.0, 0.0) and split_time([(3, 9), (4, 5)]) == (6, 0)


def refusal(options: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error message, in one line."""
    with pytest.raises(SystemExit) as ended:
        bench.main(options)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("bench.py: error: ") and message.count("\n") == 1
    return message
