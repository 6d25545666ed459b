"""What `draftless bench` compares with: other programs, transformers' compiled `generate`; and thinking, told apart."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers

from decode import Target
from docs.measure.peers import split
from draftless_commands import bench
from draftless_commands.benchmark import peers
from draftless_commands.benchmark.measurement import Measured, count_lengths
from draftless_commands.benchmark.rows import format_tables, make_rows
from tests.support.commands import Call, write_rows

PROGRAMS = """
import torch

class Steady:  # two tokens in the second pass, one in each of the others
    version = "steady 1.0"

    def load(self, model, tokenizer):
        self.model, self.asked = model, 0

    def answer(self, prompts, max_new_tokens):
        self.asked += 1
        answers = [self.model.generate(torch.tensor([each]), max_new_tokens=max_new_tokens)[0] for each in prompts]
        tokens = [answer[len(prompt):].tolist() for answer, prompt in zip(answers, prompts)]
        return [[each[:1], each[1:3], *([token] for token in each[3:])] for each in tokens]

class Stops(Steady):
    version = "stops 2.0"

    def answer(self, prompts, max_new_tokens):
        if self.asked == 3:
            raise NotImplementedError("too many\\nreally")
        return super().answer(prompts, max_new_tokens)

class Twin(Steady):
    pass

class Endless(Steady):
    version = "endless"

    def answer(self, prompts, max_new_tokens):
        return super().answer(prompts, max_new_tokens + 1)

class Nameless(Steady):
    @property
    def version(self):
        raise AttributeError("no version")

class Missing(Steady):
    version = "missing"

    def load(self, model, tokenizer):
        import no_such_library
"""


@pytest.fixture
def call(save_model: Callable[..., Path], tmp_path: Path, run_main: Call) -> Call:
    """Runs the command on three questions with a tiny model. Other programs are in `programs.py`."""
    (tmp_path / "programs.py").write_text(PROGRAMS)
    rows = [{"prompt": prompt} for prompt in ("abcabcabc", "1+1=", "Where is it?")]
    options = ["--questions", write_rows(tmp_path / "few.jsonl", rows), "--model", save_model(), "--dtype", "float64"]
    options += ["--device", "cpu", "--accelerate", "off", "--max-new-tokens", "12", "--repeats", "1"]
    return lambda *more: run_main(bench.main, *options, *more)


def test_other_programs_stand_in_the_table_and_what_they_refuse_below(
    call: Call, tmp_path: Path, run_main: Call
) -> None:
    programs = "Steady", "Stops", "Missing", "Endless", "Nameless"
    names = [f"{tmp_path / 'programs.py'}:{name}" for name in programs]
    file = tmp_path / "report.json"
    out = call("--methods", ",".join(["hf", *names]), "--json", file).out
    rows = {row["method"]: row for row in json.loads(file.read_text())["rows"] if row["category"] == "all"}
    steady = rows[names[0]]
    assert (steady["version"], steady["identical"], steady["lengths"]["all"][1]) == ("steady 1.0", 1.0, 3)
    assert steady["tokens"] == rows["hf"]["tokens"] and steady["steps"] == steady["tokens"] - 3
    assert "| steady 1.0 " in out and re.search(r"\| stops 2\.0 +\| +- \|", out) and "really" not in out
    assert "\nstops 2.0: NotImplementedError: too many\nmissing: ModuleNotFoundError: " in out
    assert "\nendless: ValueError: answer returned 13 tokens, where max_new_tokens was 12\n" in out
    assert out.count("Nameless: AttributeError: no version") == 1
    assert run_main(bench.main, "--from", file).out == out


def test_programs_of_one_version_have_rows_of_their_own(call: Call, tmp_path: Path) -> None:
    names = [f"{tmp_path / 'programs.py'}:{name}" for name in ("Steady", "Twin")]
    out = call("--methods", ",".join(names)).out
    assert out.count("| programs.py:Steady ") == out.count("| programs.py:Twin ") > 0 == out.count("steady 1.0")


def test_a_program_answers_batches_and_has_no_options(call: Call, tmp_path: Path) -> None:
    steady = f"{tmp_path / 'programs.py'}:Steady"
    run = call("--methods", steady, "--batch-size", "2", "--plot", tmp_path / "speed.svg")
    assert run.status == 0 and "| steady 1.0 " in run.out and (tmp_path / "speed.svg").is_file()
    call("--methods", f"{steady}:nodes=3").refused("a program of your own has no options")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels: torch.compile only traces."""
    config = transformers.CompileConfig
    monkeypatch.setattr(peers, "CompileConfig", lambda **options: config(backend="eager", mode="default", **options))


@pytest.mark.usefixtures("compiled")
def test_transformers_compiles_each_size_of_a_static_cache_before_it_is_timed(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SMALLEST_CACHE", 16)
    ask = Mock(wraps=peers.ask_peer)
    monkeypatch.setattr(peers, "ask_peer", ask)
    file = tmp_path / "report.json"
    call("--methods", "hf-compiled", "--json", file)
    (row,) = (row for row in json.loads(file.read_text())["rows"][-2:] if row["method"] == "hf-compiled")
    assert row["identical"] == row["tau"] == 1.0
    asked = [(called.args[1]["max_cache_len"], called.args[4]) for called in ask.call_args_list]
    assert asked == [(32, 3), *[(32, 12)] * 4]
    call("--methods", "hf-compiled", "--batch-size", "2").refused("hf-compiled answers one question at a time")


@pytest.mark.usefixtures("compiled")
def test_a_model_that_cannot_be_compiled_is_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = transformers.LlamaForCausalLM
    monkeypatch.setattr(stock, "get_compiled_call", lambda self, _: self.__call__)
    call("--methods", "hf-compiled").refused("hf-compiled: transformers' generate does not compile this model; leave")

    monkeypatch.setattr(stock, "get_compiled_call", Mock(side_effect=RuntimeError("no graph\nof it")))
    call("--methods", "hf-compiled").refused("hf-compiled: transformers cannot compile this model's generate: no graph")


def test_thinking_is_told_apart_by_the_passes_beginnings(save_model: Callable[..., Path]) -> None:
    tokenizer = Target.load(str(save_model()), dtype="float64", device="cpu").tokenizer

    def count(prompt: str, *passes: str) -> dict[str, list[int]]:
        parts = [tokenizer.encode(part) for part in passes]
        measured = Measured([[*chain(*parts)]], [[len(part) for part in parts]], 1.0)
        return count_lengths(tokenizer, [tokenizer.encode(prompt)], measured)

    assert count("u:<think> a:", "x", "yy", "z") == {"thinking": [1, 1]}
    assert count("a:<think>x</think>", "x", "yy", "z") == {"answer": [1, 1]}
    assert count("a:", "x") == {}
    lengths = count("a:", "<", "think", ">ab", "c", "d</think>e", "fgh", "i")
    assert lengths == {"answer": [1, 0, 2, 0, 1], "thinking": [1, *[0] * 8, 1]}
    measured = {"tokens": [9], "steps": [3], "nodes": [8], "loops": [False], "seconds": [1.0], "parts": None}
    turns = [{"questions": [1], "methods": {"none": {**measured, "lengths": lengths, "same": [True]}}}]
    rows = make_rows([{"category": "qa", "questions": [1], "turns": turns}], [], ["none"])
    assert rows[0]["lengths"] == {"all": [2, 0, 2, 0, 1, 0, 0, 0, 0, 1], **lengths}
    assert rows[0]["acceptance"]["thinking"] == [0.5] * 9
    shown = format_tables(rows)
    assert "| none, thinking   |           - |    5.50 | 50.0% |" in shown and "| none, answer " in shown


def test_passes_of_economize_are_told_apart_by_their_positions() -> None:
    events = [("exact", 0), ("draft", 9), ("exact", 10), ("exact", 13), ("exact", 14)]
    cost = SimpleNamespace(events=[SimpleNamespace(kind=kind, position=place) for kind, place in events])
    answer = SimpleNamespace(tokens=torch.arange(7), prompt_length=10, cost=cost)
    assert split(answer) == [[0], [1, 2, 3], [4], [5, 6]]
