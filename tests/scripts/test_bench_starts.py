"""bench.py --start: seconds and memory of starts in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import bench
from scripts.benchmark import starts
from scripts.benchmark.starts import FIRST, LATER, STOCK
from scripts.benchmark.tables import format_starts

pytestmark = pytest.mark.skipif(not starts.STATUS.exists(), reason="memory is read from Linux's /proc")


@pytest.fixture(scope="module")
def file(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of one start of each kind."""
    file = tmp_path_factory.mktemp("report") / "starts.json"
    options = ["--model", str(save_model()), "--device", "cpu", "--threads", "1", "--repeats", "1"]
    threads = torch.get_num_threads()
    bench.main(["--start", *options, "--accelerate", "off", "--json", str(file)])
    torch.set_num_threads(threads)
    return file


@pytest.mark.slow
def test_each_kind_of_start_is_measured(file: Path) -> None:
    report = json.loads(file.read_text())
    assert list(report) == ["settings", "machine", "starts"]
    assert [entry["kind"] for entry in report["starts"]] == [STOCK, FIRST, LATER]
    for entry in report["starts"]:
        (sample,) = entry["samples"]
        assert 0 < sample["loaded"] < sample["ready"]
        assert sample["peak"] > report["machine"]["weights"] > 0
        assert sample["private"] > 0
    assert report["machine"]["dtype"] == "float32" and report["machine"]["threads"] == 1
    assert "/" not in json.dumps(report["settings"])


@pytest.mark.slow
def test_report_is_shown_again(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--from", str(file)])
    assert capsys.readouterr().out.strip() == format_starts(json.loads(file.read_text()))


def test_the_cache_is_empty_for_the_first_start_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str | None, list[str]]] = []

    def start(kind: str, model: Any, places: dict[str, str]) -> dict[str, Any]:
        cache = places.get("XDG_CACHE_HOME")
        files = sorted(path.name for path in Path(cache).iterdir()) if cache else []
        seen.append((kind, cache, files))
        if kind == FIRST and cache:
            (Path(cache) / "kernel").touch()
        return {"sample": dict.fromkeys(("loaded", "ready", "peak", "private"), 1.0), "dtype": "float32", "weights": 2}

    monkeypatch.setattr(starts, "_start", start)
    report = starts.run_starts(starts.StartOptions(starts.ModelOptions("model"), repeats=2))
    assert [(kind, files) for kind, _, files in seen[1:]] == [(STOCK, []), (FIRST, []), (LATER, ["kernel"])] * 2
    assert seen[0] == (STOCK, None, []) and seen[1][1] != seen[4][1]
    assert [len(entry["samples"]) for entry in report["starts"]] == [2, 2, 2]


def test_tables_have_medians_and_ratios_to_the_weights() -> None:
    samples = [{"loaded": 1.0, "ready": float(ready), "peak": 3e6, "private": 1e6} for ready in (2, 9, 3)]
    report = {"machine": {"weights": 2_000_000}, "starts": [{"kind": FIRST, "samples": samples}]}
    cells = [cell.strip() for cell in format_starts(report).splitlines()[-1].strip("|").split("|")]
    assert cells == [FIRST, "1.0", "3.0", "3", "1.50x", "1", "0.50x"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--start", "--methods", "ngram"], "--methods is for --questions, not for --start"),
        (["--start", "--plot", "x.svg"], "--plot is for --questions, --passes and --from"),
        (["--start", "--gguf", "float32=x"], "--gguf is for --passes"),
        (["--start", "--passes"], "not allowed with argument"),
        (["--start", "--model", "no/such/model", "--repeats", "1"], "cannot load a model from 'no/such/model'"),
    ],
)
def test_wrong_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(options)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"starts": [{}]}, {"starts": 5}, {"machine": {}}, {"settings": {}}])
def test_a_damaged_report_is_refused(
    file: Path, change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.json").write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(SystemExit):
        bench.main(["--from", str(tmp_path / "out.json")])
    assert "out.json is not a report of bench.py" in capsys.readouterr().err
