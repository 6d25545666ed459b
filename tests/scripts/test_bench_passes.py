"""`draftless bench --passes`: timing passes in turns, llama-bench, the report, its tables and its picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from decode import Target
from decode.session import Session
from decode.trees.tree import Tree
from draftless_commands import bench
from draftless_commands.benchmark import passes
from draftless_commands.benchmark.passes import (
    BATCH_SIZES,
    CONTEXTS,
    LLAMA,
    LLAMA_ROUNDS,
    OURS,
    SIZES,
    find_medians,
    format_passes,
)
from tests.support.commands import Call
from tests.support.models import limit_threads, tiny

# Answers like llama-bench: 2 ms for each token. Writes its options to a file, a line for each run.
FAKE = """#!{python}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open({log!r}, "a") as file:
    file.write(json.dumps(options) + "\\n")
model = {{"model_type": "llama 1M", "model_n_params": 9, "build_commit": "abc", "n_depth": int(options["-d"])}}
sizes = [(0, int(options["-n"])), *((int(size), 0) for size in options["-p"].split(",") if size != "0")]
print(json.dumps([
    {{**model, "n_prompt": prompt, "n_gen": new, "samples_ns": [2_000_000 * (prompt + new)] * int(options["-r"])}}
    for prompt, new in sizes
]))
"""


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def folder(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a report of both dtypes and a fake llama-bench, and the options which that got."""
    folder = tmp_path_factory.mktemp("report")
    program = write_program(folder / "fake", FAKE.format(python=sys.executable, log=str(folder / "log.jsonl")))
    model = save_model(max_position_embeddings=4096)
    options = ["--passes", "--model", model, "--device", "cpu", "--accelerate", "off", "--threads", "1"]
    options += ["--repeats", "2", "--json", folder / "passes.json", "--llama-bench", program, "--gguf", "model.gguf"]
    with limit_threads(1):
        bench.main([*map(str, options), "--dtype", "float32"])
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "passes.json").read_text())
    return found


def test_report_has_its_settings_and_every_size_context_and_batch(report: dict[str, Any]) -> None:
    entries = report["passes"]
    names = ("engine", "dtype", "context", "batch")
    ours = [*product([OURS], ["float32"], CONTEXTS, BATCH_SIZES)]
    assert [tuple(entry[name] for name in names) for entry in entries] == [*ours, (LLAMA, "float32", CONTEXTS[0], 1)]
    for entry in entries:
        assert entry["nodes"] == [*SIZES] == [1, 2, 4, 8, 12, 16, 32, 64]
        count = 2 if entry["engine"] == OURS else 2 * LLAMA_ROUNDS
        assert [len(samples) for samples in entry["samples_ms"]] == [count] * len(SIZES)
        assert min(map(min, entry["samples_ms"])) > 0
        assert entry.get("weights") == ("float32" if entry["engine"] == OURS else None)
    assert find_medians(entries[-1]) == [2.0 * nodes for nodes in SIZES]
    assert list(report) == ["settings", "machine", "passes"] and report["machine"]["threads"] == 1
    settings = report["settings"]
    assert "/" not in json.dumps(settings) and (settings["repeats"], settings["accelerate"]) == (2, "off")
    assert settings["llama_cpp"] == {"float32": {"model_type": "llama 1M", "model_n_params": 9, "build_commit": "abc"}}


def test_llama_bench_is_checked_once_and_runs_in_every_round(folder: Path) -> None:
    runs = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    common = {"-m": "model.gguf", "-n": "1", "-t": "1", "-d": "256", "-o": "json"}
    check = {**common, "-p": "0", "-r": "1"}
    assert runs == [check] + [{**common, "-p": "2,4,8,12,16,32,64", "-r": str(LLAMA_ROUNDS)}] * 2


def make_entry(times: list[float], engine: str = OURS, **settings: Any) -> dict[str, Any]:
    fields = {"engine": engine, "dtype": "float32", "context": 256, "batch": 1, "nodes": [1, 8], **settings}
    return {**fields, "samples_ms": [[time] for time in times]}


def test_tables_have_ratios_to_one_node_and_to_llama_cpp() -> None:
    entries = [
        make_entry([10.0, 25.0]),
        make_entry([20.0, 80.0], batch=4),
        make_entry([40.0, 50.0], context=4000),
        make_entry([8.0, 50.0], LLAMA),
    ]
    shown = format_passes({"passes": entries}).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown if line.startswith("| ")]
    assert cells == [
        ["nodes", "float32, batch 1", "llama.cpp", "Draftless / llama.cpp", "float32, batch 4"],
        ["1", "10.0 (1.00x)", "8.0 (1.00x)", "1.25", "20.0 (1.00x)"],
        ["8", "25.0 (2.50x)", "50.0 (6.25x)", "0.50", "80.0 (4.00x)"],
        ["nodes", "float32, batch 1"],
        ["1", "40.0 (1.00x)"],
        ["8", "50.0 (1.25x)"],
    ]
    titles = [line.split()[4:7] for line in shown if line.startswith("Milliseconds")]
    assert titles == [["after", "256", "tokens"], ["after", "4000", "tokens"]]
    assert "llama.cpp" not in format_passes({"passes": entries[:3]})
    stored = format_passes({"passes": [make_entry([1.0, 2.0], weights="Q4_1")]}).splitlines()[-1]
    assert stored == "float32: weights in Q4_1, arithmetic in float32"


def test_report_is_shown_and_drawn_again(folder: Path, report: dict[str, Any], run_main: Call) -> None:
    pytest.importorskip("matplotlib")
    picture = folder / "passes.png"
    run = run_main(bench.main, "--from", folder / "passes.json", "--plot", picture)
    assert run.out.strip() == format_passes(report) and picture.stat().st_size > 1000


def test_every_round_times_all_passes_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[Any, ...]] = []

    def time(session: Session, tree: Tree) -> float:
        assert torch.is_inference_mode_enabled()
        (length,) = set(session.lengths)
        timed.append((session.target.dtype, length, len(session.lengths), tree.width))
        return 0.001 * len(timed)

    def run_llama(sizes: Any, repetitions: int) -> dict[int, Any]:
        timed.append(("llama",))
        return {size: {"samples_ns": [1e6]} for size in sizes}

    monkeypatch.setattr(passes, "time_pass", time)
    targets = {name: Target(tiny("llama", dtype=getattr(torch, name))) for name in ("float32", "float64")}
    entries = passes.time_passes(targets, CONTEXTS, {"float32": run_llama}, 2)
    all_passes = {*product([torch.float32, torch.float64], CONTEXTS, BATCH_SIZES, SIZES)}
    count = 3 * len(all_passes) + 1
    rounds = [(timed[:count], 3), (timed[count:], 2)]  # the last of so many is timed: a graph is captured in the second
    for order, times in rounds:
        assert all(order[:-1:times] == order[place:-1:times] for place in range(times))
        assert {*order[:-1:times]} == all_passes and order[-1] == ("llama",)
    assert rounds[0][0][:-1:3] != rounds[1][0][:-1:2] and len(rounds[1][0]) == 2 * len(all_passes) + 1
    samples = sorted(sample for entry in entries[:-1] for each in entry["samples_ms"] for sample in each)
    places = range(1, len(all_passes) + 1)
    assert samples == pytest.approx([3.0 * place for place in places] + [count + 2.0 * place for place in places])
    assert entries[-1]["engine"] == LLAMA and entries[-1]["samples_ms"] == [[1.0, 1.0]] * len(SIZES)


def test_a_context_without_room_is_left_out(save_model: Callable[..., Path], tmp_path: Path, run_main: Call) -> None:
    options = ["--passes", "--device", "cpu", "--dtype", "float64", "--repeats", "1", "--json", tmp_path / "out.json"]
    run = run_main(bench.main, *options, "--model", save_model(max_position_embeddings=320))
    assert "after 256 tokens" in run.out and "4000" not in run.out
    entries = json.loads((tmp_path / "out.json").read_text())["passes"]
    assert {(entry["dtype"], entry["context"]) for entry in entries} == {("float64", 256)}
    refused = run_main(bench.main, *options, "--model", save_model(max_position_embeddings=319))
    refused.refused("the model's context is 319; passes need 320")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("#!/bin/sh\necho no such architecture >&2\nexit 3\n", "failed with status 3: no such architecture"),
        ("#!/bin/sh\necho '[{}]'\n", "did not print llama-bench's JSON (KeyError('n_prompt'"),
        ("\x7fELF", "llama-bench: Exec format error"),
    ],
)
def test_a_program_that_fails_is_found_before_a_model_is_loaded(
    program: str, message: str, tmp_path: Path, run_main: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "load_target", lambda *inputs: pytest.fail("a model was loaded"))
    options = ["--llama-bench", write_program(tmp_path / "llama-bench", program), "--gguf", "model.gguf"]
    run_main(bench.main, "--passes", "--dtype", "float32", *options).refused(message)


@pytest.mark.parametrize("content", ["", "{}\n{}", "[]", '{"rows": []}', {"passes": [{}]}, {"settings": {}}])
def test_a_file_that_is_no_report_or_a_damaged_one_is_refused(
    report: dict[str, Any], content: Any, tmp_path: Path, run_main: Call
) -> None:
    """content: the file's text, or a change of the report."""
    text = content if isinstance(content, str) else json.dumps({**report, **content})
    (tmp_path / "out.json").write_text(text)
    run_main(bench.main, "--from", tmp_path / "out.json").refused("out.json is not a report of draftless bench")
