"""`draftless bench`: methods and their names, questions, rows with intervals, and continuing an interrupted run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Form

from decode import Target, costs, generate
from draftless_commands import bench
from draftless_commands.benchmark import files, measurement
from draftless_commands.benchmark.files import describe_weights, find_commit, name_numbers
from draftless_commands.benchmark.measurement import trim_loop
from draftless_commands.benchmark.methods import parse_methods
from draftless_commands.benchmark.peers import load_stock
from draftless_commands.benchmark.questions import Question, form_groups, load_questions, take_evenly, task_of
from draftless_commands.benchmark.rows import format_tables, make_rows
from draftless_commands.shared.options import ModelOptions
from draftless_commands.shared.prompts import ask, read_conversations
from tests.support.commands import Call, Run, write_rows
from tests.support.gguf_files import write_model
from tests.support.models import USUAL_COSTS, limit_threads, needs_compiler, tiny
from training.data import count_before_loop
from training.rendering import Renderer

ROOT = Path(__file__).parents[2]
RESULTS, OWN = ROOT / "docs" / "results", f"{ROOT / 'examples' / 'own_proposer.py'}:BigramProposer"
METHODS = ("none", "hf", "hf-prompt-lookup", "ngram", "merged:nodes=8", "auto:warm=true", OWN)
QUESTIONS: list[dict[str, Any]] = [
    {"question_id": 81, "category": "writing", "turns": ["abcabcabc", "again"], "reference": ["x"]},
    {"question_id": 111, "category": "math", "turns": ["1+1=", "why?"]},
    {"question_id": 321, "category": "qa", "turns": ["Where is it? Where is"]},
    {"question_id": 322, "category": "qa", "turns": ["Who?"]},
]


@pytest.fixture(scope="module")
def run(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs the command on the questions with a tiny model, and returns what `--json` wrote, if given."""
    target, questions = save_model(), tmp_path_factory.mktemp("questions") / "few.jsonl"
    questions.write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n\n")

    def call(*options: str, json_file: Path | None = None) -> dict[str, Any] | None:
        command = ["--questions", questions, "--model", target, "--dtype", "float64", "--device", "cpu"]
        command += ["--max-new-tokens", "20", "--threads", "1", *options]
        bench.main([*map(str, command), *(["--json", str(json_file)] if json_file else [])])
        return json.loads(json_file.read_text()) if json_file else None

    return call


@pytest.fixture(autouse=True, scope="module")
def hurry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One thread is fastest for tiny models. No cost is measured, nor taken from other tests, nor left to them."""
    curves = tmp_path_factory.mktemp("curves")
    with limit_threads(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "user_cache", lambda: curves)
        patch.setattr(costs, "measure_cost_curve", lambda *_: USUAL_COSTS)
        yield


@pytest.fixture(scope="module")
def folder(run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run("--methods", ",".join(METHODS), "--repeats", "1", json_file=folder / "all.json")
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "all.json").read_text())
    return found


def test_a_row_for_each_method_and_task(report: dict[str, Any]) -> None:
    assert list(report) == ["settings", "machine", "rows", "differences", "records"]
    tasks = {"mt_bench": (2, 4), "qa": (2, 2), "all": (4, 6)}
    rows = {(row["method"], row["category"]): (row["questions"], row["answers"]) for row in report["rows"]}
    assert rows == {(method, task): tasks[task] for method, task in product(METHODS, tasks)}
    speeds = {row["method"]: row["tokens_per_second"] for row in report["rows"] if row["category"] == "all"}
    for row in report["rows"][-len(METHODS) :]:
        for base in ("none", "hf"):
            assert row[f"speedup_vs_{base}"] == pytest.approx(speeds[row["method"]] / speeds[base])


def test_all_methods_give_the_tokens_of_plain_decoding(report: dict[str, Any]) -> None:
    assert {(row["identical"], row["largest_gap"]) for row in report["rows"]} == {(1.0, None)}
    rows = {row["method"]: row for row in report["rows"] if row["category"] == "all"}
    assert rows["none"]["tau"] == rows["hf"]["tau"] == 1.0  # the prompt's pass is a step for both
    taus = {name: rows[name]["tau"] for name in METHODS[2:]}
    assert min(taus.values()) > 1, taus
    assert rows["none"]["nodes_per_step"] == 0 < rows[OWN]["nodes_per_step"] <= rows["merged:nodes=8"]["nodes_per_step"]
    assert rows["merged:nodes=8"]["nodes_per_step"] < 8  # the root is one of the nodes
    assert sum(rows["ngram"]["parts"].values()) == pytest.approx(1) and rows["hf"]["parts"] is None
    assert set(rows["merged:nodes=8"]["accepted"]) == {"suffix", "recycling", "grammar"}
    assert rows["auto:warm=true"]["accepted"]["stored"] >= 0


def test_accepted_lengths_count_the_tokens_of_all_passes_but_the_prompts(report: dict[str, Any]) -> None:
    for row in report["rows"]:
        (counts,), rates = row["lengths"].values(), row["acceptance"]["all"]
        assert sum(counts) == row["steps"] - row["answers"]
        assert sum((1 + number) * count for number, count in enumerate(counts)) == row["tokens"] - row["answers"]
        assert rates == sorted(rates, reverse=True) and len(rates) == len(counts) - 1


def test_conversations_continue_with_the_answers_of_plain_decoding(
    report: dict[str, Any], run: Any, save_model: Callable[..., Path]
) -> None:
    target = Target.load(str(save_model()), dtype="float64", device="cpu")
    for fields, record in zip(QUESTIONS, report["records"], strict=True):
        conversation = ask(fields["turns"], "here")
        for turn in record["turns"]:
            prompt = Renderer(target.tokenizer).encode(conversation)
            (answer,) = generate(target, [prompt], None, max_new_tokens=20)
            assert turn["prompt_tokens"] == [len(prompt)]
            assert turn["methods"]["none"]["tokens"] == [len(answer.tokens)]
            conversation.add(answer.text)
        assert conversation.answers == len(fields["turns"])


def test_nothing_in_the_report_names_a_folder(folder: Path, report: dict[str, Any]) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["all.json"]  # no partial file is left
    settings, machine = report["settings"], report["machine"]
    assert "/" not in json.dumps({**settings, "methods": None})
    assert machine.items() >= {"dtype": "float64", "threads": 1, "compiled": False, "weights": "float64"}.items()
    assert (settings["questions"], settings["commit"]) == ("few.jsonl", find_commit())


def test_report_is_shown_again(folder: Path, report: dict[str, Any], run_main: Call) -> None:
    shown = run_main(bench.main, "--from", folder / "all.json").out
    assert shown.strip() == format_tables(report["rows"])
    part = run_main(bench.main, "--from", folder / "all.json", "--methods", "hf,ngram").out
    assert "| ngram " in part and "merged" not in part
    refused = run_main(bench.main, "--from", folder / "all.json", "--methods", "eagle")
    refused.refused("has no method eagle; it has none, hf")
    assert "| none " in shown and "| mt_bench " in shown and "| own_proposer.py:BigramProposer " in shown


def test_the_commit_is_the_checkouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)
    assert find_commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert find_commit() == commit
    (tmp_path / "file").write_text("2")
    assert find_commit() == commit + "-dirty"


PUBLISHED = {  # pictures of the pages: the result, and the methods that are shown
    "headline": ("methods-blocks-cpu", "hf,none,ngram,merged,auto"),
    "passes-blocks-cpu": ("passes-blocks-cpu", None),
}


@pytest.mark.parametrize("picture", PUBLISHED)
def test_pictures_of_the_pages_have_the_words_of_their_results(picture: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result, methods = PUBLISHED[picture]
    drawn, options = tmp_path / "drawn.svg", ["--methods", methods] if methods else []
    bench.main(["--from", str(RESULTS / f"{result}.json"), *options, "--plot", str(drawn)])
    published = ROOT / "docs" / "pictures" / f"{picture}.svg"
    words = [re.findall("<!-- (.*) -->", file.read_text(encoding="utf-8")) for file in (drawn, published)]
    assert words[0] == words[1]
    assert any("Q4_1 and Q8_0" in word for word in words[0])


@needs_compiler
def test_weights_are_named_by_what_they_are_stored_in(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "m.gguf", (Form.Q4_1, Form.Q8_0))
    options = {"bfloat16": {"dtype": "bfloat16"}, "float32": {"accelerate": "off"}, "Q4_1": {"accelerate": "packed"}}
    for expected, option in options.items():
        target = Target.load(tmp_path / "m.gguf", **option)
        described = {"dtype": str(target.dtype).removeprefix("torch."), "weights": describe_weights(target)}
        assert described["weights"].startswith(expected)
        assert ("arithmetic in float32" in name_numbers(described)) == (expected == "Q4_1")
    assert set(described["weights"].split(" and ")) == {"Q4_1", "Q8_0"}
    model = tiny("llama", dtype=torch.float32)
    halved = model.to(torch.bfloat16).to(torch.float32)  # float32 weights that bfloat16 holds
    assert describe_weights(Target(halved, accelerate="packed")) == "bfloat16"


def test_an_interrupted_run_continues(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int | str] = []
    cuts = [3]  # questions before Ctrl-C
    measure, partial = measurement.measure_group, tmp_path / "out.json.partial"

    def count(methods: Any, group: Sequence[Question], *rest: Any) -> Any:
        if len(asked) in cuts:
            cuts.clear()
            raise KeyboardInterrupt
        asked.extend(question.id for question in group)
        return measure(methods, group, *rest)

    monkeypatch.setattr(measurement, "measure_group", count)
    options = ["--methods", "ngram", "--repeats", "1"]
    with pytest.raises(SystemExit) as ended:
        run(*options, json_file=tmp_path / "out.json")
    assert ended.value.code == 130
    assert [path.name for path in tmp_path.iterdir()] == [partial.name]
    whole = partial.read_bytes()
    for content, seed, message in ((whole, "7", "was begun with seed 0, not 7"), (whole[:-9], "0", "is damaged (")):
        partial.write_bytes(content)
        with pytest.raises(SystemExit) as ended:
            run(*options, "--seed", seed, json_file=tmp_path / "out.json")
        err = capsys.readouterr().err
        assert ended.value.code == 2 and f"{partial} {message}" in err
    partial.write_bytes(whole)
    report = run(*options, json_file=tmp_path / "out.json")
    assert "continuing after 3 of 4 groups of questions" in capsys.readouterr().err
    assert asked == [number for record in report["records"] for number in record["questions"]] == [81, 111, 321, 322]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert {row["method"] for row in report["rows"]} == {"none", "ngram"}
    assert {row["speedup_vs_hf"] for row in report["rows"]} == {None}


def test_sampled_batches(run: Any, tmp_path: Path) -> None:
    options = ["--methods", "none,ngram,merged", "--batch-size", "2", "--repeats", "1", "--accelerate", "off"]
    report = run(*options, "--temperature", "0.8", json_file=tmp_path / "out.json")
    assert [record["questions"] for record in report["records"]] == [[81, 111], [321, 322]]
    assert {row["identical"] for row in report["rows"]} == {1.0}  # same seed, same text


def test_differences_are_reported_with_their_gap(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = measurement.measure_group

    def spoil(methods: dict[str, Any], *rest: Any) -> Any:
        def open_spoiled(is_warm_up: bool) -> Any:
            ask = methods["ngram"](is_warm_up)

            def wrong(*inputs: Any) -> Any:
                measured = ask(*inputs)
                measured.answers[0][3] = 5
                return measured

            return wrong

        return original({**methods, "ngram": open_spoiled}, *rest)

    monkeypatch.setattr(measurement, "measure_group", spoil)
    options = ["--methods", "ngram", "--limit", "2", "--repeats", "1"]
    report = run(*options, json_file=tmp_path / "out.json")
    found = [(entry["question_id"], entry["turn"], entry["position"]) for entry in report["differences"]]
    assert found == [(81, 0, 3), (81, 1, 3), (321, 0, 3)]
    assert {entry["method"] for entry in report["differences"]} == {"ngram"}
    rows = {(row["method"], row["category"]): row for row in report["rows"]}
    assert rows["ngram", "all"]["identical"] == 0 and rows["none", "all"]["identical"] == 1
    gaps = [entry["gap"] for entry in report["differences"]]
    assert rows["ngram", "all"]["largest_gap"] == max(gaps) > 0
    assert rows["ngram", "qa"]["largest_gap"] == gaps[2]
    assert "0% (gap " in capsys.readouterr().out


def make_record(number: int, category: str, *turns: dict[str, Any]) -> dict[str, Any]:
    """The record of a question. turns: what was measured in each, by method."""
    entries = [{"questions": [number], "methods": turn} for turn in turns]
    return {"category": category, "questions": [number], "turns": entries}


def test_rows_take_medians_over_repeats() -> None:
    def entry(tokens: int, steps: int, seconds: list[float], loop: bool) -> dict[str, Any]:
        parts = {"proposer": 1.0, "target": 6.0, "accept": 2.0, "rest": 1.0}
        measured = {"tokens": [tokens], "steps": [steps], "nodes": [8], "loops": [loop], "seconds": seconds}
        trimmed = (8, 6) if loop else (tokens, steps)
        return {"none": {**measured, "same": [not loop], "parts": parts, "trimmed": [trimmed]}}

    records = [
        make_record(1, "stem", entry(10, 5, [1.0, 9.0, 2.0], False), entry(20, 10, [3.0, 3.0, 3.0], True)),
        make_record(2, "rag", entry(30, 5, [1.0, 1.0, 7.0], False)),
    ]
    gap = {"question_id": 1, "turn": 1, "method": "none", "position": 4, "gap": 0.25}
    rows = {row["category"]: row for row in make_rows(records, [gap], ["none"])}
    assert list(rows) == ["mt_bench", "rag", "all"]
    row = rows["all"]
    assert (row["tokens"], row["seconds"], row["tau"], row["tokens_per_second"]) == (60, 6.0, 3.0, 10.0)
    assert row["tau_by_question"] == (30 / 15 + 30 / 5) / 2
    assert row["tau_trimmed"] == (10 + 8 + 30) / (5 + 6 + 5)
    assert (row["loops"], row["identical"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert row["nodes_per_step"] == 24 / 20
    assert row["parts"] == {"proposer": 0.1, "target": 0.6, "accept": 0.2, "rest": 0.1}
    assert [rows[task]["largest_gap"] for task in rows] == [0.25, None, 0.25]
    assert (row["speedup_vs_none"], row["speedup_vs_hf"]) == (1.0, None)


def test_intervals_are_bootstrapped_over_questions() -> None:
    seconds = {"none": [1.0] * 40, "steady": [0.5] * 40, "mixed": [0.25, 1.0] * 20}
    entry = {"tokens": [10], "steps": [10], "nodes": None, "loops": [False], "same": [True], "parts": None}
    records = [
        make_record(number, "qa", {name: entry | {"seconds": [values[number]]} for name, values in seconds.items()})
        for number in range(40)
    ]
    made = make_rows(records, [], [*seconds])
    rows = {row["method"]: row for row in made if row["category"] == "qa"}
    assert rows["none"]["speedup_vs_none_interval"] == [1.0, 1.0]
    assert rows["steady"]["speedup_vs_none_interval"] == [2.0, 2.0]
    assert {row["speedup_vs_hf_interval"] for row in rows.values()} == {None}
    low, high = rows["mixed"]["speedup_vs_none_interval"]
    # Seconds per question have mean 0.625 and deviation 0.375; 1.96 standard errors of 40 questions are 0.116.
    assert (low, high) == (pytest.approx(1 / (0.625 + 0.116), rel=0.02), pytest.approx(1 / (0.625 - 0.116), rel=0.02))
    assert made == make_rows(records, [], list(rows)) and "1.60x [1." in format_tables(made)


def test_a_limit_keeps_the_balance_of_the_tasks() -> None:
    counts = {"writing": 5, "roleplay": 5, "stem": 5, "translation": 9, "qa": 1}
    questions = [
        Question(f"{name} {n}", name, ask(["?"], name)) for name, count in counts.items() for n in range(count)
    ]
    taken = [question.id for question in take_evenly(questions, 9)]
    assert taken == ["writing 0", "writing 1", "roleplay 0", "stem 0", *[f"translation {n}" for n in range(4)], "qa 0"]
    assert take_evenly(questions, None) == take_evenly(questions, 99) == questions
    groups = form_groups(questions, 4)
    assert [len(group) for group in groups] == [4, 4, 4, 3, 4, 4, 1, 1]
    assert all(len({task_of(question.category) for question in group}) == 1 for group in groups)


def test_an_answer_is_cut_where_its_loop_repeats_the_first_token() -> None:
    loop = [*range(100, 110), *[7, 8, 9] * 20]
    assert count_before_loop(loop) == count_before_loop([*loop, 5, 6]) == 13
    assert count_before_loop(loop[:-1]) == 69  # too short for a loop
    assert trim_loop(loop, [1, 5, 5, 5, *[9] * 6]) == (13, 4)
    assert trim_loop(loop, [1, 5, 7, 3, *[9] * 6]) == (13, 3)
    assert trim_loop([4, 5], [1, 1]) == (2, 2)


NONE = ("none", "none", {}, False)
NAMES: dict[str, list[tuple[str, str, dict[str, Any], bool]]] = {
    "none, none,": [],
    "merged:nodes=16, head=hydra,my/file.py:Mine": [
        ("merged:nodes=16,head=hydra", "merged", {"nodes": 16, "head": "hydra"}, False),
        ("my/file.py:Mine", "my/file.py:Mine", {}, False),
    ],
    "auto:warm=true,nodes=8,hf:top_p=0.5,top_k=-1,x=nan": [
        ("auto:warm=true,nodes=8", "auto", {"nodes": 8}, True),
        ("hf:top_p=0.5,top_k=-1,x=nan", "hf", {"top_p": 0.5, "top_k": -1, "x": "nan"}, False),
    ],
}


@pytest.mark.parametrize("text", NAMES)
def test_names_of_methods(text: str) -> None:
    assert [(each.text, each.name, each.options, each.warm) for each in parse_methods(text)] == [NONE, *NAMES[text]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"question_id": 1, "category": ["qa"], "turns": ["?"]}', "line 1: category is a name"),
        ('{"question_id": 2, "prompt": "?"}\n{"prompt": "?"}', "line 2: question_id 2 is there twice"),
        ('{"question_id": [1], "category": "qa", "turns": ["?"]}', "question_id is a number or a name"),
        ('{"question_id": 1, "category": "all", "turns": ["?"]}', "category is a name, and not 'all'"),
    ],
)
def test_bad_questions_are_refused_by_line(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_questions(tmp_path / "bad.jsonl")


CHAT = [{"role": "system", "content": "be"}, {"role": "user", "content": "Hi"}]
SAID = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}, {"from": "human", "value": "What?"}]


def test_questions_come_in_every_format_of_prompts(tmp_path: Path, run: Any, save_model: Callable[..., Path]) -> None:
    last = {"prompt": "Who?", "system": "be", "category": "qa", "question_id": "last", "response": "Me."}
    rows = [{"prompt": "Why?"}, {"messages": CHAT}, {"conversations": SAID}, {"turns": ["a", "b"]}, last]
    file = write_rows(tmp_path / "prompts.jsonl", rows)
    ids = [(each.id, each.category) for each in load_questions(Path(file))]
    assert ids == [*((n, "questions") for n in (1, 2, 3, 4)), ("last", "qa")]
    report = run("--questions", file, "--methods", "ngram", "--repeats", "1", json_file=tmp_path / "report.json")
    renderer = Renderer(Target.load(str(save_model()), dtype="float64", device="cpu").tokenizer)
    for read, record in zip(read_conversations(file), report["records"], strict=True):
        assert record["turns"][0]["prompt_tokens"] == [len(renderer.encode(read))]
    assert [len(record["turns"]) for record in report["records"]] == [1, 1, 1, 2, 1]


LAYOUTS: list[tuple[int | str, str, dict[str, Any]]] = [  # the question's id and category, and its line
    (241, "rag", {"question_id": 241, "category": "rag", "turns": ["?"]}),  # Spec-Bench
    (101, "math", {"question_id": 101, "category": "math", "turns": ["1+1?", "Why?"], "reference": ["2", ""]}),
    ("HumanEval/0", "questions", {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f", "test": ""}),
    (1, "questions", {"question": "How many?", "answer": "So 2.\n#### 2"}),  # GSM8K
    ("9f", "speed_bench_math", {"question_id": "9f", "category": "math", "sub_category": "a", "turns": ["?", "Why?"]}),
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_questions_of_published_files(
    layout: tuple[int | str, str, dict[str, Any]], suffix: str, tmp_path: Path
) -> None:
    *named, row = layout
    file = tmp_path / f"questions.{suffix}"
    if suffix == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    else:
        write_rows(file, [row])
    (read,) = load_questions(file)
    assert [read.id, read.category] == named
    turns = row.get("turns") or [row.get("prompt") or row["question"]]
    assert [read.conversation.messages[0]["content"], *read.conversation.later] == turns


def test_rows_of_a_table_lack_what_has_no_value(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": "Hi", "messages": None}, {"prompt": None, "messages": [{"role": "user", "content": "Yo"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = read_conversations(str(tmp_path / "rows.parquet"))
    assert [each.messages[0]["content"] for each in read] == ["Hi", "Yo"]


def test_speed_bench_without_its_texts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\n{question}"
    row = {"question_id": "9f", "category": "math", "sub_category": "x", "turns": [missing]}
    with pytest.raises(ValueError, match=r"line 1: the text is missing; give the test.parquet of SPEED-Bench's"):
        load_questions(Path(write_rows(tmp_path / "raw.jsonl", [row])))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pip install pyarrow reads .parquet files, or give a .jsonl file"):
        load_questions(tmp_path / "some.parquet")


def test_a_prompt_that_fills_the_context_is_refused_and_a_later_turn_gets_the_room_that_is_left(
    save_model: Callable[..., Path], tmp_path: Path, run_main: Call
) -> None:
    def ask_long(*turns: list[str]) -> Run:
        rows = [{"question_id": number, "category": "qa", "turns": each} for number, each in enumerate(turns)]
        options = ["--questions", write_rows(tmp_path / "long.jsonl", rows), "--json", tmp_path / "o", "--repeats", "1"]
        options += ["--model", save_model(), "--device", "cpu", "--dtype", "float64", "--max-new-tokens", "12"]
        return run_main(bench.main, *options)

    ask_long(["?"], ["long " * 60]).refused("long.jsonl, line 2: turn 0 has 305 tokens; the model's context of 256")
    err = ask_long(["long " * 47, "more"], ["long " * 44, "more"]).err
    assert "long.jsonl, line 1: turn 1 has" in err and "leaves no room for an answer: it ends here" in err
    report = json.loads((tmp_path / "o").read_text())
    assert [len(record["turns"]) for record in report["records"]] == [1, 2]
    last = report["records"][1]["turns"][1]
    assert all(last["prompt_tokens"][0] + method["tokens"][0] <= 256 for method in last["methods"].values())
    assert {row["identical"] for row in report["rows"]} == {1.0}


def test_peers_of_a_target_that_rounds_are_in_float32(save_model: Callable[..., Path]) -> None:
    folder = str(save_model())
    stock = load_stock(Target.load(folder), ModelOptions(folder, dtype="fixed16"), 0.0)
    assert stock.dtype == torch.float32


def test_a_folder_may_hold_the_default_model(tmp_path: Path) -> None:
    assert ModelOptions().may_be_default and ModelOptions(str(tmp_path)).may_be_default
    assert not ModelOptions("someone/other").may_be_default
