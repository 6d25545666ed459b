"""`draftless bench --first-hour`: a part that fails or hangs is a line of the page, and what is done is kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftless_commands import bench
from draftless_commands.benchmark import first_hour
from draftless_commands.benchmark.first_hour import DONE, PAGE, REPORT, Part, run_parts
from tests.support.commands import Call

CPU = torch.device("cpu")


def python(name: str, program: str, minutes: float = 1) -> Part:
    return Part(name, [sys.executable, "-c", program], minutes)


def test_a_part_that_fails_or_hangs_is_a_line_of_the_page(tmp_path: Path) -> None:
    parts = [
        python("fails", "print('so far', flush=True); raise LookupError('no kernel')"),
        python("hangs", "import time; print('measured', flush=True); time.sleep(60)", minutes=0.02),
        python("works", "import sys; print('all'); print('draftless: no graphs', file=sys.stderr)"),
    ]
    report = run_parts(parts, tmp_path, CPU)
    assert [part["status"] for part in report["parts"]] == ["failed (1)", "killed after 0.02 minutes", DONE]
    assert json.loads((tmp_path / REPORT).read_text()) == report
    page = (tmp_path / PAGE).read_text()
    for text in ("so far", "LookupError: no kernel", "measured", "all", "draftless: no graphs", "| killed after"):
        assert text in page


def test_the_same_command_goes_on_after_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs"
    parts = [python(name, f"open({str(file)!r}, 'a').write({name!r}); assert {name!r} != 'b'") for name in "abc"]
    run_parts(parts[:2], tmp_path, CPU)
    assert [part["name"] for part in run_parts(parts, tmp_path, CPU)["parts"]] == ["a", "b", "c"]
    assert file.read_text() == "abbc"
    monkeypatch.setattr(first_hour, "describe_machine", lambda device: {"gpu": "another"})
    with pytest.raises(ValueError, match=r'was begun with .*gpu null, not "another"'):
        run_parts(parts, tmp_path, CPU)
    (tmp_path / REPORT).write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        run_parts(parts, tmp_path, CPU)


@pytest.mark.parametrize(
    ("options", "reason"),
    [(["--methods", "ngram"], "--methods is not for --first-hour"), (["--device-map", "auto"], "for one device")],
)
def test_what_it_cannot_do_is_refused(options: list[str], reason: str, tmp_path: Path, run_main: Call) -> None:
    run_main(bench.main, "--first-hour", tmp_path / "hour", *options).refused(reason)
    assert not (tmp_path / "hour").exists()


@pytest.mark.slow
def test_the_whole_hour_is_rehearsed_on_a_cpu(
    save_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(dtype=torch.float32, num_hidden_layers=1, max_position_embeddings=512)
    listed = first_hour.list_parts
    limit = {"methods": 0.01}  # minutes
    monkeypatch.setattr(
        first_hour,
        "list_parts",
        lambda *given: [Part(part.name, part.command, limit.get(part.name, 5)) for part in listed(*given)],
    )
    options = ["--device", "cpu", "--model", str(model), "--limit", "2", "--max-new-tokens", "8", "--repeats", "1"]
    bench.main(["--first-hour", str(tmp_path / "hour"), *options])
    report = json.loads((tmp_path / "hour" / REPORT).read_text())
    ended = {part["name"]: part["status"] for part in report["parts"]}
    assert ended.pop("methods").startswith("killed")
    assert set(ended.values()) == {DONE}, ended
    assert "EAGLE-3, 60 nodes" in capsys.readouterr().out
