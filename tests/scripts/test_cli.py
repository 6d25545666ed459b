"""`draftless generate`: its output, and its error messages for bad input."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from decode import Chunk, Sampling, Target
from decode import generate as answer
from decode.devices import user_cache
from draftless_commands import generate
from draftless_commands.shared.command import Parser, failing_clearly
from draftless_commands.shared.terminal import has_colour
from proposers.sources import AnswerStore
from tests.support.commands import Call, Run, Screen, write_rows
from tests.support.models import needs_compiler, tiny

ROOT = Path(__file__).parents[2]
# The last two are the bytes of an "é", so that some answers have whole and half characters.
ALPHABET = ["<pad>", "<s>", "</s>", *map(chr, range(33, 127)), "Ġ", "Ċ", "Ã", "©"]
ENDS = [2, 40, 50]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS = ["ab ab ab ab", "Tell me.", "é", "one two three one two"]
DRAFTERS = {"none": [], "ngram": [], "auto": [], "draft": ["--draft-model", "draft"]}
SAMPLED = ["--temperature", "0.9", "--top-k", "30", "--top-p", "0.9", "--seed", "5"]


def make_tokenizer(template: str | None, alphabet: Sequence[str] = ALPHABET) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = template
    return tokenizer


def save(folder: Path, kind: str = "llama", template: str | None = TEMPLATE, ends: Any = ENDS, **changes: Any) -> None:
    model = tiny(kind, **{"vocab_size": len(ALPHABET), **changes})
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: a target, a draft, and some that cannot be used."""
    root = tmp_path_factory.mktemp("models")
    save(root / "target")
    save(root / "draft", seed=1, num_hidden_layers=1)
    save(root / "endless", ends=None)
    save(root / "bare", template=None)
    save(root / "short", max_position_embeddings=60)
    save(root / "other")
    make_tokenizer(TEMPLATE, ALPHABET[::-1]).save_pretrained(root / "other")
    save(root / "recurrent", "mamba")
    save(root / "damaged")
    (root / "damaged" / "model.safetensors").write_bytes(b"half of it")
    (root / "model.gguf").write_bytes(b"GGUF")
    write_rows(root / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    return root


@pytest.fixture
def call(folder: Path, monkeypatch: pytest.MonkeyPatch, run_main: Call) -> Call:
    monkeypatch.chdir(folder)
    return lambda *arguments: run_main(generate.main, *arguments)


@pytest.fixture
def ask_rows(call: Call, tmp_path: Path) -> Call:

    def ask(rows: Sequence[Any], *arguments: str) -> Run:
        return call(*BASE, "--prompt-file", write_rows(tmp_path / "rows.jsonl", rows), "--json", *arguments)

    return ask


BASE = ["--model", "target", "--dtype", "float64"]
TO_FILE = [*BASE, "--prompt-file", "prompts.jsonl", "--max-new-tokens", "24", "--json"]


def answer_with_transformers(folder: Path, prompts: Sequence[str], chat: bool) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = make_tokenizer(TEMPLATE)
    answers = []
    for prompt in prompts:
        text = f"<user>{prompt}\n<assistant>" if chat else prompt
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        answers.append(model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist())
    return answers


def test_a_draft_model_may_have_another_tokenizer(call: Call, folder: Path) -> None:
    run = call(*TO_FILE, "--proposer", "draft", "--draft-model", "other", "--no-chat")
    assert run.status == 0 and run.err.startswith("draftless: the draft model has another tokenizer, with ")
    assert [row["tokens"] for row in run.rows] == answer_with_transformers(folder / "target", PROMPTS, chat=False)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("chat", [True, False])
def test_json_has_the_answers_of_transformers(call: Call, folder: Path, name: str, size: int, chat: bool) -> None:
    option = "--chat" if chat else "--no-chat"
    run = call(*TO_FILE, "--proposer", name, *DRAFTERS[name], "--batch-size", str(size), option)
    assert (run.status, run.err) == (0, "")
    assert [row["tokens"] for row in run.rows] == answer_with_transformers(folder / "target", PROMPTS, chat)
    assert [(row["index"], row["turn"]) for row in run.rows] == [(index, 0) for index in range(len(PROMPTS))]
    tokenizer = make_tokenizer(TEMPLATE)
    for prompt, row in zip(PROMPTS, run.rows, strict=True):
        text = tokenizer.decode(row["tokens"], skip_special_tokens=True)
        assert row["text"] == text.rstrip("\ufffd")
        assert row["prompt_tokens"] == len(prompt.encode()) + chat * len("<user>\n<assistant>")
        assert row["finish"] == ("eos" if row["tokens"][-1] in ENDS else "length")
        assert row["tau"] == len(row["tokens"]) / row["steps"] and row["seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(len(row["tokens"]) / row["seconds"])
        assert len(row["tokens"]) >= row["steps"] + sum(row["accepted_by_depth"]) - 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_seed_gives_the_same_text_with_any_proposer_and_batch_size(call: Call, name: str) -> None:
    expected = call(*TO_FILE, *SAMPLED, "--proposer", "none").rows
    rows = call(*TO_FILE, *SAMPLED, "--proposer", name, *DRAFTERS[name], "--batch-size", "3").rows
    assert [row["text"] for row in rows] == [row["text"] for row in expected]
    others = call(*TO_FILE, *SAMPLED, "--seed", "6").rows
    assert [row["text"] for row in others] != [row["text"] for row in expected]


def test_every_setting_of_sampling_is_an_option(call: Call, target: Target) -> None:
    """But for processors, which are objects."""
    given = {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.4, "seed": 3}
    assert {*given, "processors"} == {field.name for field in fields(Sampling) if field.init}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    (row,) = call(*BASE, "--prompt", "ab", "--no-chat", "--json", "--max-new-tokens", "30", *options).rows
    texts = {}
    for settings in (given, {**given, "min_p": 0.0}):
        (expected,) = answer(target, "ab", None, max_new_tokens=30, chat=False, sampling=Sampling(**settings))
        texts[settings["min_p"]] = expected.tokens
    assert row["tokens"] == texts[0.4] != texts[0.0]


@pytest.mark.parametrize("size", ["1", "3"])
@pytest.mark.parametrize("colour", [True, False])
def test_the_streamed_text_is_that_of_json(
    call: Call, monkeypatch: pytest.MonkeyPatch, size: str, colour: bool
) -> None:
    # The draft model is the target, so most draft tokens are accepted and coloured.
    settings = [*TO_FILE, "--batch-size", size, "--proposer", "draft", "--draft-model", "target", "--nodes", "8"]
    texts = [row["text"] for row in call(*settings).rows]
    monkeypatch.setattr("draftless_commands.generate.has_colour", lambda file: colour)
    run = call(*[part for part in settings if part != "--json"])
    assert run.status == 0
    assert (re.search(r"\033\[38;5;\d+m", run.out) is not None) == colour
    plain = re.sub(r"\033\[[\d;]*m", "", run.out)
    assert plain == "".join(f"--- prompt {index}, turn 0 ---\n{text}\n" for index, text in enumerate(texts))
    figures = r"\d+ prompt tokens, \d+ tokens in \d+ steps \(tau [\d.]+\), [\d.]+ s, [\d.]+ tokens/s, accepted by .*"
    assert [bool(re.fullmatch(figures, line)) for line in run.err.splitlines()] == [True] * len(PROMPTS)


def test_a_conversation_has_all_its_turns(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "turns.jsonl"
    file.write_text('{"turns": ["ab", "cd", "ef"]}\n\n{"prompt": "x"}\n{"turns": ["gh", "ij"]}\n')
    settings = [*BASE, "--prompt-file", str(file), "--max-new-tokens", "9", *SAMPLED]
    rows = call(*settings, "--json").rows
    places = [(row["index"], row["turn"]) for row in rows]
    assert places == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2)]
    said = {place: row["text"] for place, row in zip(places, rows, strict=True)}
    history = f"<user>ab\n<assistant>{said[0, 0]}\n<user>cd\n<assistant>{said[0, 1]}\n<user>ef\n<assistant>"
    assert rows[-1]["prompt_tokens"] == len(make_tokenizer(None)(history)["input_ids"])
    batched = call(*settings, "--json", "--batch-size", "2").rows
    assert [row["tokens"] for row in batched] == [row["tokens"] for row in rows]
    streamed = call(*settings, "--batch-size", "3").out
    assert streamed == "".join(f"--- prompt {i}, turn {t} ---\n{said[i, t]}\n" for i, t in places)


def test_standard_input_is_one_prompt(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines\n")))
    tokens = call(*BASE, "--prompt-file", "-", "--json").rows[0]["tokens"]
    assert tokens == call(*BASE, "--prompt", "two\nlines", "--json").rows[0]["tokens"]


def test_answers_end_before_a_stop_string(call: Call) -> None:
    text = call(*BASE, "--prompt", "go", "--json").rows[0]["text"]
    row = call(*BASE, "--prompt", "go", "--json", "--stop", "nowhere", "--stop", text[3:5]).rows[0]
    assert row["text"] == text[: text.index(text[3:5])] and row["finish"] == "stop"


def test_half_precision_and_a_device_map_work(call: Call) -> None:
    for settings in (["--dtype", "bfloat16"], ["--dtype", "float32", "--device", "cpu"], ["--device-map", "auto"]):
        assert call("--model", "target", "--prompt", "x", "--max-new-tokens", "3", *settings).status == 0


@needs_compiler
def test_a_compiled_model_gives_the_same_tokens(call: Call, exported: list[str]) -> None:
    asked = ["--model", "target", "--dtype", "float32", "--prompt", "x", "--max-new-tokens", "8", "--json"]
    expected = call(*asked).rows[0]["tokens"]
    assert not exported
    assert call(*asked, "--accelerate", "compiled").rows[0]["tokens"] == expected and exported


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "damaged"], "cannot load a model from 'damaged'"),
        (["--model", "recurrent", "--accelerate", "off"], "mamba fails the self-test and cannot verify a chain"),
        (["--model", "short", "--prompt", "x" * 80], "has 98 tokens; the model's context of 60 leaves no room"),
        (["--model", "model.gguf"], "the header of model.gguf is damaged or cut off"),
        (["--prompt", "x", "--prompt-file", "prompts.jsonl"], "not allowed with argument --prompt"),
        (["--template-option", "deep=false"], "--template-option gives 'deep', which this"),
        (["--device", "cuda:99"], "device 'cuda:99' is not there"),
        (["--device", "cpu", "--device-map", "auto"], "exclude each other"),
        (["--accelerate", "compiled"], "--accelerate compiled is for --device cpu and --dtype float32"),
        (["--stop", ""], "--stop needs a text"),
        (["--model", "bare", "--chat"], "no chat template; leave out --chat"),
    ],
)
def test_bad_options_are_refused_in_one_line(call: Call, arguments: list[str], message: str) -> None:
    given = [] if "--prompt-file" in arguments else ["--prompt", "x"]
    call(*BASE, *given, *arguments).refused(message)


def test_a_store_is_written_by_one_run(call: Call, tmp_path: Path) -> None:
    store = str(tmp_path / "answers.store")
    held = generate.hold(store)
    call("--prompt", "x", "--store", store).refused(f"--store {store} is used by another run")
    held.release()
    assert call("--prompt", "x", "--store", store, "--max-new-tokens", "2").status == 0


def test_an_answer_that_fails_says_why(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.reading.Reading.read_part", Mock(side_effect=torch.OutOfMemoryError("out of memory")))
    assert "error: prompt 0: OutOfMemoryError: out of memory" in call("--prompt", "x").err


def test_a_warning_is_one_line_and_an_error_has_its_notes(run_main: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn_and_fail(arguments: Sequence[str]) -> None:
        parser = Parser(prog="draftless tried")
        with failing_clearly(parser):
            shown = warnings.formatwarning
            monkeypatch.setattr(warnings, "showwarning", lambda *given, **_: sys.stderr.write(shown(*given)))
            warnings.warn("this is\nslow", stacklevel=1)
            error = ValueError("no token")
            error.add_note("raised in Mine.propose (mine.py, line 3)")
            raise error

    usual = warnings.formatwarning
    run = run_main(warn_and_fail)
    assert run.err.splitlines() == [
        "draftless tried: warning: this is slow",
        "draftless tried: error: no token; raised in Mine.propose (mine.py, line 3)",
    ]
    assert warnings.formatwarning is usual


PROMPT_KINDS: dict[str, tuple[str | bytes, list[str], int, str]] = {  # prompt, options, status, message
    "blanks around": (" ab ", [], 0, ""),
    "text as it is": ("ab", ["--no-chat"], 0, ""),
    "a special token inside": ("a</s>b", [], 0, ""),
    "a rendered chat": ("<user>ab\n<assistant>", [], 0, "begins with '<user>', as if the chat template had been"),
    "blanks": (" \n", [], 2, "--prompt: the prompt is empty"),
    "half a character": ("ab\ud800", [], 2, "half of one (a surrogate)"),
    "a file": (b"two\nlines\n", [], 0, ""),
    "a file of bytes": (b"\xff\xfe", [], 2, "prompt.txt"),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", PROMPT_KINDS)
def test_every_kind_of_prompt_is_answered_or_refused(
    call: Call, target: Target, tmp_path: Path, recwarn: pytest.WarningsRecorder, name: str
) -> None:
    prompt, options, status, message = PROMPT_KINDS[name]
    source = ["--prompt", prompt]
    if isinstance(prompt, bytes):
        (tmp_path / "prompt.txt").write_bytes(prompt)
        source = ["--prompt-file", str(tmp_path / "prompt.txt")]
    run = call(*BASE, *source, *options, "--json", "--max-new-tokens", "5", "--proposer", "none", "--accelerate", "off")
    warned = " ".join(text for each in recwarn if "the prompt begins" in (text := str(each.message)))
    if status:
        run.refused(message)
        return
    assert run.status == 0 and message in warned and bool(message) >= bool(warned)
    text = prompt.decode().removesuffix("\n") if isinstance(prompt, bytes) else prompt
    ids = target.tokenizer(text if options else f"<user>{text}\n<assistant>")["input_ids"]
    [expected] = answer(target, ids, None, max_new_tokens=5)
    assert [(row["prompt_tokens"], row["tokens"]) for row in run.rows] == [(len(ids), expected.tokens)]


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(str(folder / "target"), dtype="float64", accelerate="off")


@pytest.mark.parametrize("settings", [["--model", "bare"], ["--no-chat"]])
def test_without_a_chat_template_the_texts_of_turns_are_joined(ask_rows: Call, settings: list[str]) -> None:
    first, second = ask_rows([{"turns": ["x", "y"]}], "--max-new-tokens", "5", *settings).rows
    (alone,) = ask_rows([{"prompt": f"x{first['text']}\n\ny"}], "--max-new-tokens", "5", *settings).rows
    assert (second["tokens"], second["prompt_tokens"]) == (alone["tokens"], alone["prompt_tokens"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x" * 300}, "rows.jsonl, line 2: turn 0 has 318 tokens"),
        ({"prompt": "x", "tools": [{"name": "f"}]}, "line 2: the row gives 'tools', which this model's chat template"),
        ({"prompt": "x", "chat_template_kwargs": {"tokenize": 1}}, "'tokenize', which is no option of a chat template"),
        ({"prompt": "x", "images": ["y"]}, "line 2: 'images' would change the text"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "a message is by one of system"),
    ],
)
def test_a_bad_row_is_found_before_the_first_is_answered(ask_rows: Call, row: dict[str, Any], message: str) -> None:
    ask_rows([{"prompt": "x"}, row]).refused(message)


def test_a_conversation_that_outgrows_the_context_ends_alone(ask_rows: Call) -> None:
    run = ask_rows([{"turns": ["a", "x" * 300]}, {"turns": ["b", "c"]}])
    assert run.status == 1 and "line 1: turn 1 has" in run.err and "it ends here" in run.err
    assert [(row["index"], row["turn"]) for row in run.rows] == [(0, 0), (1, 0), (1, 1)]


def test_ended_answers_are_printed_if_the_run_stops_early(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = call(*TO_FILE).rows
    real = generate.stream

    def stop_before_the_first_ends(*arguments: Any, **settings: Any) -> Iterator[Chunk]:
        yield from (chunk for chunk in real(*arguments, **settings) if chunk.request_id != 0)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "stream", stop_before_the_first_ends)
    run = call(*TO_FILE, "--batch-size", "4")
    assert (run.status, run.err) == (130, "")
    assert [row["tokens"] for row in run.rows] == [row["tokens"] for row in expected[1:]]


def test_an_error_amid_an_answer_begins_on_a_line_of_its_own(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    layers = ()\n\n    def propose(self, step, budget):\n        return max([])\n")
    run = call(*BASE, "--prompt", "ab", "--proposer", f"{file}:Mine")
    assert run.status == 2 and run.out.endswith("\n") and len(run.out) > 1
    assert run.err.startswith("draftless generate: error: max() ")
    assert run.err.endswith("; raised in Mine.propose (mine.py, line 5)\n")
    assert call(*BASE, "--prompt", "ab", "--proposer", f"{file}:Mine", "--json").out == ""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_only_terminals_have_colour(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], expected: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm-256color", **settings}.items():
        monkeypatch.setenv(name, value)
    assert has_colour(Screen()) == expected and not has_colour(io.StringIO())


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    kernels = folder / "cache" / "draftless" / "kernels"
    if not kernels.exists():
        kernels.parent.mkdir(parents=True)
        kernels.symlink_to(user_cache.build_folder())  # compiling takes most of a minute
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    environment = {**os.environ, **own}
    command = [sys.executable, "-m", "draftless", "generate", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.fixture
def long_run(folder: Path, tmp_path: Path) -> list[str]:
    """Options of a run that prints its first answer soon and would take a minute for all of them."""
    file = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "x"}] * 100)
    return ["--model", "endless", "--prompt-file", file, "--max-new-tokens", "200", "--batch-size", "2"]


@pytest.mark.slow
def test_an_interrupt_leaves_whole_lines(folder: Path, long_run: list[str]) -> None:
    with start(folder, *long_run, "--json") as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    rows = Run(0, first + rest, "").rows
    assert [row["index"] for row in rows] == list(range(len(rows)))
    assert 1 <= len(rows) < 100 and {len(row["tokens"]) for row in rows} == {200}


@pytest.mark.slow
def test_an_interrupt_keeps_the_answers_of_a_store(folder: Path, long_run: list[str], tmp_path: Path) -> None:
    kept = tmp_path / "answers.store"
    with start(folder, *long_run, "--json", "--proposer", "merged", "--store", str(kept)) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    (store := AnswerStore()).load(kept)
    assert len(store)


def test_an_interrupt_during_the_imports_prints_nothing(folder: Path, long_run: list[str]) -> None:
    with start(folder, *long_run, "--json") as process:
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode in (130, -signal.SIGINT) and err == ""


@pytest.mark.slow
def test_a_closed_pipe_ends_the_run(folder: Path, long_run: list[str]) -> None:
    with start(folder, *long_run) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 141
    assert all(" prompt tokens, " in line for line in err.splitlines())
