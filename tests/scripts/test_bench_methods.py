"""The methods of bench.py: names, sizes of trees and their picture, sources, kept answers, trimmed loops."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from proposers.sources import SOURCES
from scripts import bench
from scripts.benchmark.measurement import trim_loop
from scripts.benchmark.method_names import parse_method
from scripts.benchmark.node_plot import find_families
from scripts.benchmark.tables import format_tables
from tests.support.bench_runs import hurry_bench, make_bench
from training.data import count_before_loop

SIZED = ("ngram-8", "suffix-8", "recycling-8", "merged-8", "merged-without-suffix-8")


@pytest.fixture(scope="module")
def run(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs bench.py with a model that sees the last token only, so that its text soon runs into a loop."""

    def save(**overrides: Any) -> Path:
        folder = save_model(**overrides)
        model = AutoModelForCausalLM.from_pretrained(folder)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data.zero_()
        model.save_pretrained(folder)
        return folder

    return make_bench(save, tmp_path_factory.mktemp("questions"))


@pytest.fixture(autouse=True, scope="module")
def hurry() -> Iterator[None]:
    with hurry_bench():
        yield


@pytest.fixture(scope="module")
def report(run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A report of trees of fixed size, prompt lookup in both ways, and kept answers; answers long enough to loop."""
    options = ["--methods", ",".join((*SIZED, "prompt-lookup-5", "prompt-lookup", "merged-warm-8"))]
    options += ["--peers", "hf-prompt-lookup,hf-prompt-lookup-5", "--repeats", "1", "--max-new-tokens", "80"]
    found: dict[str, Any] = run(*options, json_file=tmp_path_factory.mktemp("report") / "out.json")
    return found


def overall(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in report["rows"] if row["category"] == "all"}


def all_turns(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [turn["methods"] for record in report["records"] for turn in record["turns"]]


def test_the_root_is_one_of_the_nodes_everywhere(report: dict[str, Any]) -> None:
    rows = overall(report)
    for name in SIZED:
        assert 1 < rows[name]["nodes_per_step"] <= 8 - 1, name  # without the root
    assert rows["prompt-lookup-5"]["nodes_per_step"] <= 5
    assert {row["identical"] for row in rows.values()} == {1.0}


@pytest.mark.parametrize("length", [5, 10])
def test_prompt_lookup_accepts_what_transformers_does(report: dict[str, Any], length: int) -> None:
    """Both have the same drafts, but transformers' first draft is checked in the prompt's pass."""
    ours, theirs = ("prompt-lookup", "hf-prompt-lookup") if length == 10 else ("prompt-lookup-5", "hf-prompt-lookup-5")
    for turn in all_turns(report):
        assert turn[ours]["steps"][0] - turn[theirs]["steps"][0] in (0, 1)
    assert overall(report)[ours]["tau"] > 1.5


def test_the_share_of_each_source_is_shown(report: dict[str, Any]) -> None:
    rows = overall(report)
    assert set(rows["merged-8"]["accepted"]) == {*SOURCES}
    assert set(rows["merged-warm-8"]["accepted"]) == {*SOURCES, "stored"}
    assert set(rows["merged-without-suffix-8"]["accepted"]) == {*SOURCES} - {"suffix"}
    assert rows["ngram-8"]["accepted"] is rows["hf"]["accepted"] is None
    accepted = rows["merged-8"]["accepted"]
    assert 0 < sum(accepted.values()) <= rows["merged-8"]["tokens"] - rows["merged-8"]["steps"]
    table = next(part for part in format_tables(report["rows"]).split("\n\n") if "accepted by source" in part)
    line = next(line for line in table.splitlines() if line.startswith("| merged-8 "))
    shares = [float(cell.strip(" %")) for cell in line.split("|")[2:-1] if cell.strip() != "-"]
    assert sum(shares) == pytest.approx(100, abs=0.3)


def test_answers_are_kept_in_the_store_alone(report: dict[str, Any]) -> None:
    """The first turn has an empty store. Later a store can be of use, also in the second turn of a conversation."""
    turns = all_turns(report)
    assert turns[0]["merged-warm-8"]["steps"] == turns[0]["merged-8"]["steps"]
    assert turns[0]["merged-warm-8"]["accepted"]["stored"] == 0
    assert overall(report)["merged-warm-8"]["accepted"]["stored"] > 0


def test_second_turns_have_a_row(report: dict[str, Any]) -> None:
    turns = [record["turns"][1]["methods"] for record in report["records"] if len(record["turns"]) == 2]
    for row in report["rows"]:
        if row["category"] == "second_turns":
            assert row["tokens"] == sum(turn[row["method"]]["tokens"][0] for turn in turns)
            assert row["steps"] == sum(turn[row["method"]]["steps"][0] for turn in turns)
    assert "| second_turns " in format_tables(report["rows"])


def test_loops_are_trimmed_for_all_methods_alike(report: dict[str, Any]) -> None:
    rows = overall(report)
    assert rows["none"]["loops"] > 0
    for turn in all_turns(report):
        assert len({method["trimmed"][0][0] for method in turn.values()}) == 1
        for method in turn.values():
            tokens, steps = method["trimmed"][0]
            assert 0 < tokens <= method["tokens"][0] and 0 < steps <= method["steps"][0]
    assert rows["none"]["tau_trimmed"] == rows["hf"]["tau_trimmed"] == 1
    assert 1 <= rows["prompt-lookup"]["tau_trimmed"] < rows["prompt-lookup"]["tau"]
    assert "| tau, loops trimmed " in format_tables(report["rows"])


def test_an_answer_is_cut_where_its_loop_repeats_the_first_token() -> None:
    text = list(range(100, 110))
    loop = [*text, *[7, 8, 9] * 20]
    assert count_before_loop(loop) == count_before_loop([*loop, 5, 6]) == 13
    assert count_before_loop(loop[:-1]) == 69  # too short for a loop
    assert count_before_loop([]) == 0
    assert trim_loop(loop, [1, 5, 5, 5, *[9] * 6]) == (13, 4)
    assert trim_loop(loop, [1, 5, 7, 3, *[9] * 6]) == (13, 3)
    assert trim_loop([4, 5], [1, 1]) == (2, 2)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_methods_with_several_sizes_are_drawn_by_nodes(report: dict[str, Any], tmp_path: Path, suffix: str) -> None:
    families = {name: [*rows] for name, rows in find_families(report).items()}
    assert families == {"prompt-lookup": [6, 11]}
    pytest.importorskip("matplotlib")
    (tmp_path / "report.json").write_text(json.dumps(report))
    picture = tmp_path / f"nodes{suffix}"
    bench.main(["--from", str(tmp_path / "report.json"), "--plot", str(picture)])
    assert picture.stat().st_size > 1000
    if suffix == ".svg":  # text is drawn as paths, with the text as a comment
        assert "nodes of a draft tree" in picture.read_text()


@pytest.mark.parametrize("batch", ["2", "4"])
def test_merged_trees_in_batches_are_compared_with_plain_decoding_of_the_same_size(
    run: Any, tmp_path: Path, batch: str
) -> None:
    options = ["--methods", "merged,merged-8,merged-warm-8", "--batch-size", batch, "--repeats", "1"]
    report = run(*options, json_file=tmp_path / "out.json")
    assert [len(record["questions"]) for record in report["records"]] == [1, 1, 2]
    rows = overall(report)
    assert {row["identical"] for row in rows.values()} == {1.0}
    for row in rows.values():
        ratio = row["tokens_per_second"] / rows["none"]["tokens_per_second"]
        assert row["speedup_vs_none"] == pytest.approx(ratio)
    assert rows["merged-warm-8"]["tau"] >= 1


def test_a_run_with_kept_answers_cannot_continue(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, asked = bench.measure_group, []

    def interrupt(*inputs: Any) -> Any:
        if asked:
            raise KeyboardInterrupt
        asked.append(1)
        return measure(*inputs)

    monkeypatch.setattr(bench, "measure_group", interrupt)
    options = ["--methods", "merged-warm-8", "--peers", "", "--repeats", "1"]
    for status in (130, 2):
        with pytest.raises(SystemExit) as ended:
            run(*options, json_file=tmp_path / "out.json")
        assert ended.value.code == status
    assert "has lost the answers that were kept to draft from; remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind", "nodes", "without", "keeps"),
    [
        ("ngram", "ngram", None, None, False),
        ("ngram-16", "ngram", 16, None, False),
        ("prompt-lookup", "prompt-lookup", 11, None, False),
        ("prompt-lookup-5", "prompt-lookup", 6, None, False),
        ("suffix-8", "suffix", 8, None, False),
        ("merged-warm", "merged", None, None, True),
        ("merged-without-recycling-8", "merged", 8, "recycling", False),
        ("merged-warm-without-suffix-hydra-16", "merged", 16, "suffix", True),
        ("hydra-static-64", "hydra", 64, None, False),
        ("eagle3-chain-5", "eagle3", 6, None, False),
        ("auto", "auto", None, None, False),
    ],
)
def test_names_of_methods(name: str, kind: str, nodes: int | None, without: str | None, keeps: bool) -> None:
    method = parse_method(name)
    assert (method.kind, method.nodes, method.without, method.keeps_answers) == (kind, nodes, without, keeps)
    assert method.options.head == ("hydra" if "merged" in name and "hydra" in name else None)


@pytest.mark.parametrize(
    "name",
    [
        "telepathy",
        "none-3",
        "ngram-1",
        "merged-0",
        "auto-16",
        "suffix-warm",
        "merged-without",
        "merged-without-hydra",
        "merged-hydra-static-16",
        "prompt-lookup-0",
        "hydra-chain-5",
        "merged-warm-warm",
        "",
    ],
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown method"):
        parse_method(name)
