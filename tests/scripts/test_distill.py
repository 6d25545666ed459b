"""`draftless distill`: prompts in, the model's own answers out, after interruptions too."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from decode import Answer, Sampling, Target, generate
from decode.models.fingerprint import fingerprint_vocabulary
from decode.requests.answer import Stats
from draftless_commands import distill
from tests.support.commands import Call, Run, write_rows
from training.rendering import Renderer

SPECIAL = re.compile(r"</s>|<pad>")
BASE = ["--dtype", "float64", "--max-new-tokens", "40", "--batch-size", "4"]
QUESTIONS = ["ab ab", "Tell me.", "x", "one two three one two", "Why?", "A long question, " * 5, "0 1 2 3", "zz"]


@pytest.fixture(scope="module")
def model(save_model: Callable[..., Path]) -> Path:
    return save_model()


@pytest.fixture(scope="module")
def looping(save_model: Callable[..., Path]) -> Path:
    """A model that sees the last token only, so that it soon repeats itself."""
    folder = save_model()
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def call(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_main: Call) -> Call:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)

    def run(*arguments: str, name: str | Path = "model") -> Run:
        return run_main(distill.main, "--out", "out.jsonl", "--model", name, *BASE, *arguments)

    return run


def read() -> list[dict[str, Any]]:
    """The rows of the file, sorted by id."""
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: str(row["id"]))


def test_each_answer_matches_plain_decoding(call: Call, model: Path) -> None:
    rows = [{"id": f"q{place}", "source": "s", "prompt": prompt} for place, prompt in enumerate(QUESTIONS)]
    assert call(write_rows("in.jsonl", rows), "--temperature", "0", "0.9", "--seed", "7").status == 0
    target, answers = Target.load(model, dtype="float64"), read()
    assert {row["temperature"] for row in answers} == {0.0, 0.9}
    for place, row in enumerate(answers):
        sampling = Sampling(temperature=row["temperature"], seed=7)
        alone = generate(target, [QUESTIONS[place]], None, request_ids=[place], sampling=sampling, max_new_tokens=40)[0]
        assert row == {
            "id": f"q{place}",
            "source": "s",
            "temperature": row["temperature"],
            "prompt": QUESTIONS[place],
            "response": row["response"],
            "finished": alone.finish == "eos",
            "response_tokens": len(alone.tokens),
            "vocabulary": fingerprint_vocabulary(target.tokenizer),
            "token_ids": [[alone.prompt, alone.tokens]],
        }
        assert SPECIAL.sub("", row["response"]) == alone.text
    assert {row["finished"] for row in answers} == {True, False}


def test_turns_are_asked_in_order(call: Call, model: Path) -> None:
    target = Target.load(model, dtype="float64")
    texts = [*map(chr, range(33, 97))]
    answers = generate(target, texts, None, max_new_tokens=40)
    ending = [text for text, answer in zip(texts, answers, strict=True) if answer.finish == "eos"]
    asked = [{"turns": [ending[0], "b", "c"]}, {"turns": ["A", "b"]}, {"turns": [ending[1], "no?"]}, {"prompt": "x"}]
    assert call(write_rows("in.jsonl", asked)).status == 0
    for place, row in enumerate(read()[:3]):
        messages = row["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        tokens = 0
        for end in range(1, len(messages), 2):
            answer = generate(target, [messages[:end]], None, max_new_tokens=40)[0]
            tokens += len(answer.tokens)
            assert SPECIAL.sub("", messages[end]["content"]) == answer.text
            assert messages[end - 1]["content"] == asked[place]["turns"][end // 2]
            assert (answer.finish == "eos") == (row["finished"] or end < len(messages) - 1)
        assert row["response_tokens"] == tokens
        assert len(messages) == 2 * len(asked[place]["turns"]) or not row["finished"]
    assert len(read()[0]["messages"]) > 2 and "response" in read()[3]


def test_a_template_that_refuses_the_models_answers_is_named_once(call: Call, model: Path) -> None:
    target, texts = Target.load(model, dtype="float64"), [*map(chr, range(33, 97))]
    answers = generate(target, texts, None, max_new_tokens=40)
    first, second, *_ = (text for text, answer in zip(texts, answers, strict=True) if answer.finish == "eos")
    shutil.copytree(model, "refusing")
    template = Path("refusing/chat_template.jinja")
    refusing = "{% if messages[1:] %}{{ raise_exception('no answers') }}{% endif %}"
    template.write_text(refusing + template.read_text())
    run = call(write_rows("in.jsonl", [{"turns": [first, "b"]}, {"turns": [second, "b"]}]), name="refusing")
    assert [(row["cut"], len(row["messages"])) for row in read()] == [("template", 2)] * 2
    assert run.err.count("no answers") == 1 and "such conversations end before that turn" in run.err


def test_files_of_several_kinds_are_combined(call: Call) -> None:
    Path("plain.txt").write_text("Two\nlines\n")
    rows = [{"id": "own", "prompt": "x", "temperature": 0.5}, {"prompt": "y", "source": "elsewhere"}]
    run = call("plain.txt", write_rows("in.jsonl", rows), write_rows("more.jsonl", rows[1:]))
    assert run.status == 0 and run.out.startswith("out.jsonl: 4 answers (0 cut), ")
    assert [(row["id"], row["source"], row["prompt"], row["temperature"]) for row in read()] == [
        ("in:2", "elsewhere", "y", 0),
        ("more:1", "elsewhere", "y", 0),
        ("own", "in", "x", 0.5),
        ("plain:1", "plain", "Two\nlines", 0),
    ]


def test_a_repeated_temperature_gets_a_larger_share(call: Call) -> None:
    rows = [{"prompt": str(number)} for number in range(300)]
    jobs = distill.read_jobs([write_rows("in.jsonl", rows)], [0.0, 0.0, 0.8])
    assert 170 < sum(job.temperature == 0 for job in jobs) < 230
    fewer = distill.read_jobs([write_rows("in.jsonl", rows[:50])], [0.0, 0.0, 0.8])
    assert [job.temperature for job in fewer] == [job.temperature for job in jobs[:50]]


def test_loops_are_dropped_counted_and_not_repeated(call: Call, looping: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [write_rows("in.jsonl", [{"prompt": "x"}, {"turns": ["y", "z"]}]), "--max-new-tokens", "100"]
    run = call(*options, name=str(looping))
    assert run.status == 0 and run.out == "out.jsonl: 0 answers (0 cut), 0 tokens; dropped: 2 loop\n"
    first, second = read()
    assert first == {"id": 1, "source": "in", "temperature": 0.0, "prompt": "x", "dropped": "loop"}
    assert second["dropped"] == "loop" and second["messages"] == [{"role": "user", "content": "y"}]
    monkeypatch.setattr(distill, "load_target", lambda args: pytest.fail("something was made again"))
    assert call(*options, name=str(looping)).out == run.out


def test_prompts_whose_logits_are_no_numbers_are_dropped_alone(call: Call, save_model: Callable[..., Path]) -> None:
    folder = save_model()
    rows = [{"prompt": "zz"}, {"prompt": "t^o"}, {"prompt": "Why?"}, {"turns": ["^", "x"]}]
    options = [write_rows("in.jsonl", rows), "--max-new-tokens", "6"]
    assert call(*options, name=folder).status == 0
    before = read()
    assert not any("^" in row["response"] for row in before[:3:2])
    Path("out.jsonl").unlink()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float64")
    model.model.embed_tokens.weight.data[3 + ord("^") - 32] = float("nan")
    model.save_pretrained(folder)
    run = call(*options, name=folder)
    found = read()
    assert run.status == 0 and run.out.endswith("dropped: 2 nan\n")
    assert found[:3:2] == before[:3:2]
    assert found[1] == {"id": 2, "source": "in", "temperature": 0.0, "prompt": "t^o", "dropped": "nan"}
    assert found[3]["dropped"] == "nan"
    Path("out.jsonl").unlink()
    run = call(write_rows("in.jsonl", [{"prompt": "^"}, {"prompt": "a^"}]), name=folder)
    assert run.status == 2 and "the logits of all 2 prompts are NaN or infinite" in run.err
    assert run.err.strip().count("error:") == 1


def answered(text: str, finish: Any) -> Answer:
    return Answer([0], [6] * len(text), text, finish, Stats())


def test_what_fails_for_want_of_memory_is_asked_again(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = write_rows("in.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    with monkeypatch.context() as patch:
        patch.setattr("decode.reading.Reading.read_part", Mock(side_effect=torch.OutOfMemoryError("out of memory")))
        run = call(prompts)
        assert run.status == 2 and "out of memory; the answers so far are kept" in run.err
    assert call(prompts).status == 0 and not any("dropped" in row for row in read())


def test_a_conversation_is_kept_up_to_the_answer_that_is_dropped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_rows("in.jsonl", [{"turns": ["a", "b", "c"]}, {"prompt": "d"}])
    talk, single = distill.read_jobs([path], [0.0])
    renderer = Renderer(AutoTokenizer.from_pretrained(model))
    for text in (" one", "two!!"):
        assert talk.take(answered(text, "eos"), renderer) is None
    row = talk.take(answered("loop", "criterion"), renderer)
    assert row is not None and row["cut"] == "loop" and row["finished"] and row["response_tokens"] == 9
    assert [message["content"] for message in row["messages"]] == ["a", "###", "b", "####"]
    assert single.take(answered(" ", "length"), renderer) == {**single.row(), "dropped": "empty"}


def test_prompts_without_room_in_the_context_are_dropped(call: Call) -> None:
    run = call(write_rows("in.jsonl", [{"prompt": "x" * 300}, {"turns": ["y", "z" * 300]}, {"prompt": "x" * 230}]))
    rows = read()
    room = sum("dropped" not in row for row in rows)
    assert run.status == 0 and f"{room} answers" in run.out and f"dropped: {3 - room} context" in run.out
    assert rows[0] == {"id": 1, "source": "in", "temperature": 0.0, "prompt": "x" * 300, "dropped": "context"}
    assert rows[2]["response_tokens"] <= 256 - 230 and "dropped" not in rows[2]


def test_a_run_continues_after_the_last_complete_line(call: Call) -> None:
    texts = [f"{'long ' * (place % 7)}{place}" for place in range(24)]
    kinds = [{"prompt": text} if place % 5 else {"turns": [text, "and?"]} for place, text in enumerate(texts)]
    rows = [row | {"temperature": 0.8 * (place % 2)} for place, row in enumerate(kinds)]
    asked, file = [write_rows("in.jsonl", rows), "--max-new-tokens", "12"], Path("out.jsonl")
    call(*asked)
    expected, raw = read(), file.read_bytes()
    dice = random.Random(0)
    for cut in (0, 1, len(raw) - 1, *(dice.randrange(len(raw)) for _ in range(4))):
        file.write_bytes(raw[:cut])
        assert call(*asked).status == 0
        assert read() == expected
        assert file.read_bytes().startswith(raw[: raw.rfind(b"\n", 0, cut) + 1])


GOOD, OTHER = {"id": 1, "prompt": "x"}, {"id": 9, "prompt": "y"}


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"id": 1, "prompt": "y"}, [], "in.jsonl, line 2 has the id 1 of in.jsonl, line 1; give each row its own"),
        ({"id": 1.5, "prompt": "y"}, [], "line 2: an id is a whole number or a text, not 1.5"),
        ({"prompt": "x", "temperature": -1}, [], "line 2: temperature is -1.0; it must be 0 (greedy)"),
        (OTHER, ["--temperature", "nan"], "--temperature: temperature is nan; it must be 0"),
        (OTHER, [], "there is no such folder"),  # of the model
    ],
)
def test_bad_input_is_found_before_a_model_is_loaded(call: Call, row: Any, options: list[str], message: str) -> None:
    call(write_rows("in.jsonl", [GOOD, row]), *options, name="nowhere/at/all").refused(message)
    assert not Path("out.jsonl").exists()


def test_answers_of_other_settings_are_not_mixed(call: Call) -> None:
    prompts = write_rows("in.jsonl", [GOOD])
    assert call(prompts).status == 0
    before = Path("out.jsonl").read_bytes()
    call(prompts, "--seed", "1").refused("out.jsonl was begun with seed 0, not 1; go on with the same, or give another")
    call(prompts, "--temperature", "0", "0.8").refused("was begun with temperature [0.0], not [0.0, 0.8]")
    for changed in ({"prompt": "other"}, GOOD | {"temperature": 0.5}):
        call(write_rows("in.jsonl", [changed])).refused("out.jsonl has another prompt or temperature with the id 1")
    Path("out.jsonl").write_bytes(before + b"{}\n")
    call(prompts).refused("is damaged ('id')")
    Path("out.jsonl.settings.json").unlink()
    call(prompts).refused("out.jsonl has no out.jsonl.settings.json next to it")
    assert Path("out.jsonl").read_bytes() == before + b"{}\n"


def test_without_a_template_chats_are_plain_text_and_options_refused(call: Call, model: Path) -> None:
    bare = Path("bare")
    bare.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).symlink_to(file)
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    tools = write_rows("tools.jsonl", [GOOD, {"messages": chat, "tools": [{"name": "f"}]}])
    call(tools, name="bare").refused("tools.jsonl, line 2: the row gives 'tools', which needs a chat template")
    assert not Path("out.jsonl").exists()
    assert call(write_rows("in.jsonl", [GOOD, {"messages": chat}]), name="bare").status == 0
    tokenizer = AutoTokenizer.from_pretrained(bare)
    assert [row["token_ids"][0][0] for row in read()] == [tokenizer("x").input_ids, tokenizer("s\n\nx").input_ids]


def test_the_same_path_with_another_model_is_refused(call: Call, model: Path, save_model: Callable[..., Path]) -> None:
    two = write_rows("two.jsonl", [GOOD, OTHER])
    assert call(write_rows("in.jsonl", [GOOD])).status == 0
    before = Path("out.jsonl").read_bytes()
    Path("model").unlink()
    shutil.copytree(save_model(seed=1), "model")
    call(two).refused("the model's weights changed since out.jsonl was begun; give another --out, or go on with --ch")
    template = Path("model/chat_template.jinja")
    template.write_text("x" + template.read_text())
    call(two).refused("the model's weights and chat template changed since out.jsonl was begun")
    assert Path("out.jsonl").read_bytes() == before
    assert call(two, "--changed-model").status == 0 and len(read()) == 2
