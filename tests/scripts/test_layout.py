"""Help and tables fit terminals of 100 columns, help those of 80 columns too; long work shows progress on them."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import draftless
from decode import Target
from draftless_commands import calibrate, demo
from draftless_commands.bench import read_report
from draftless_commands.benchmark import passes
from draftless_commands.benchmark.passes import format_passes
from draftless_commands.benchmark.rows import format_tables, shorten
from draftless_commands.checking.report import check_folder
from draftless_commands.checking.serving import draft_chains
from draftless_commands.shared.command import Parser
from draftless_commands.shared.options import ModelOptions
from draftless_commands.shared.results import WIDTH, to_markdown
from heads import save_head
from proposers.calibration import Calibration
from tests.support.commands import Call, Screen
from tests.support.drafting import make_head
from tests.support.models import tiny

RESULTS = sorted((Path(__file__).parents[2] / "docs" / "results").glob("*-cpu.json"))


def measure_width(text: str) -> int:
    return max(map(len, text.splitlines()))


@pytest.mark.parametrize("columns", [80, 100, 200])
@pytest.mark.parametrize("command", draftless.COMMANDS)
def test_help_fits_the_terminal(command: str, columns: int, run_main: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    run = run_main(import_module(f"draftless_commands.{command}").main, "--help")
    assert run.status == 0 and 60 < measure_width(run.out) < min(columns, 100)
    assert not re.search(r"\w-\n", run.out)  # names such as --draft-model stay whole
    usage, *_ = run.out.split("\n\n")
    assert usage.count("\n") < 2 and usage.endswith("[options]")


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("generate", ["--promt", "hi"], "there is no option --promt; did you mean --prompt? (see"),
        ("generate", ["--prompt", "--zebra"], "there is no option --zebra (see"),
        ("generate", ["--prompt=--zebra", "--nods", "4"], "there is no option --nods; did you mean --nodes?"),
        ("bench", ["--method", "none"], "there is no option --method; did you mean --methods?"),
    ],
)
def test_a_mistyped_option_is_named(command: str, options: list[str], message: str, run_main: Call) -> None:
    """Before what follows from it, for example that a required option is missing."""
    run_main(import_module(f"draftless_commands.{command}").main, *options).refused(message)


def test_values_that_argparse_takes_are_taken() -> None:
    """Text with spaces or after "=", and all that follows "--", is no option."""
    parser = Parser(prog="x")
    parser.add_argument("--prompt")
    parser.add_argument("files", nargs="*")
    assert parser.parse_args(["--prompt", "--no such option"]).prompt == "--no such option"
    assert parser.parse_args(["--prompt=--zebra"]).prompt == "--zebra"
    assert parser.parse_args(["--prompt", "-1", "--", "--zebra"]).files == ["--zebra"]


def test_a_wide_table_becomes_several_with_the_same_lines() -> None:
    lines = [[f"{row} and column {column}" * 2 for column in range(9)] for row in range(3)]
    tables = [
        [re.split(r" *\| *", line)[1:-1] for line in part.splitlines()] for part in to_markdown(lines).split("\n\n")
    ]
    assert len(tables) > 1 and measure_width(to_markdown(lines)) <= WIDTH
    rows = [[table[row] for table in tables] for row in (0, 2, 3)]  # line 1 is the rule
    assert [[cells[0] for cells in row] for row in rows] == [[line[0]] * len(tables) for line in lines]
    assert [[cell for cells in row for cell in cells[1:]] for row in rows] == [line[1:] for line in lines]
    assert len(to_markdown([["a", "b"], ["c" * 90, "d" * 90]]).split("\n\n")) == 1  # nothing is left to take apart


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_tables_of_reports_fit_100_columns(file: Path) -> None:
    report = read_report(file, None)
    assert measure_width(format_passes(report) if "passes" in report else format_tables(report["rows"])) <= 100


def test_names_of_methods_have_no_folders_and_stay_different() -> None:
    names = ["none", "merged:nodes=16,head=hydra", "a/b/my.py:Mine", "x/same.py:Mine", "y/same.py:Mine"]
    assert [*shorten(names).values()] == [*names[:2], "my.py:Mine", *names[3:]]


@pytest.mark.parametrize("heads", [1, 15])
def test_a_calibrations_tables_fit_100_columns(heads: int) -> None:
    row = tuple(1 / (1 + rank) for rank in range(10))
    calibration = Calibration((row,) * heads, ((0.0, 1.0, 0.0),) * heads, (123456,) * heads)
    shown = calibrate.describe(calibration, 8)
    assert measure_width(shown) <= 100
    assert shown.count("12.5%") == heads == shown.count("123456 |") and "| rank 7" not in shown


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], list[str]]:
    """What some work shows on a terminal's stderr, and on one that is none, where it must be nothing."""

    def run(work: Callable[[], Any]) -> list[str]:
        shown = []
        for stream in (Screen(), io.StringIO()):
            monkeypatch.setattr(sys, "stderr", stream)
            work()
            shown.append(stream.getvalue())
        assert shown[1] == ""
        return shown[0].split("\r")

    return run


def test_the_demo_compares_all_methods_within_the_terminal(
    monkeypatch: pytest.MonkeyPatch, run_main: Call, save_model: Callable[..., Path]
) -> None:
    model = ModelOptions(str(save_model()), dtype="float64", accelerate="off")
    monkeypatch.setattr(demo, "ModelOptions", lambda: model)
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 5)
    monkeypatch.setattr(demo, "PROMPTS", [prompt[:150] for prompt in demo.PROMPTS])
    monkeypatch.setenv("COLUMNS", "100")
    run = run_main(demo.main)
    assert run.status == 0 and 90 < measure_width(run.out) <= 100
    _, _, *lines = [line for line in run.out.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(row[0], row[-2]) for row in rows] == [(name, "100%") for name in ("none", *demo.METHODS.split(","))]
    assert [float(row[1]) for row in rows[:2]] == [1.0, 1.0] and min(float(row[1]) for row in rows) >= 1.0


def test_check_and_passes_show_progress(show: Any, tmp_path: Path, save_model: Any) -> None:
    target = Target.load(save_model(), dtype="float32", accelerate="off")
    save_head(make_head("medusa", Target(tiny("llama")), output="own"), tmp_path / "medusa")
    assert any(" tokens/s" in line for line in show(lambda: check_folder(tmp_path / "medusa", target, "model")))
    assert any(" tokens/s" in line for line in show(lambda: draft_chains(tmp_path / "medusa", target, 2)))
    count = len(passes.SIZES) * len(passes.BATCH_SIZES)
    lines = show(lambda: passes.time_passes({"float32": target}, [20], {}, 1))
    assert any(f"{count}/{count} [" in line for line in lines)
