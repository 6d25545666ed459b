"""Every Python block of README and docs and every example runs, and every command line has options that exist."""

from __future__ import annotations

import argparse
import io
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from importlib import import_module
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, AutoTokenizer

import decode.models.default_model
import heads
import proposers.load
from decode import Target, generate
from draftless import COMMANDS
from heads import save_head
from tests.support.drafting import make_head
from tests.support.models import CACHE, tiny

ROOT = Path(__file__).parent.parent
FOLDERS = ("*.md", "docs/*.md", "heads/pretrained/*/*/README.md")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for folder in FOLDERS for path in ROOT.glob(folder)
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
INDENTED = re.compile(r"(?:^    .*\n)+", re.M)
SAME = "the same tokens as plain decoding: True\n"
COMMAND = re.compile(rf"(?:^|[ (])draftless ({'|'.join(COMMANDS)})\b(.*)")
END_OF_COMMAND = {">", "|", ";", "&&", "done", "do"}


def list_blocks(page: str, *languages: str) -> list[str]:
    return [text for language, text in FENCE.findall(PAGES[page]) if language in languages]


def list_commands(page: str) -> list[tuple[str, list[str]]]:
    """Command and arguments of each command line in a code block."""
    blocks = [*list_blocks(page, "sh", "bash", "text", ""), *INDENTED.findall(FENCE.sub("", PAGES[page]))]
    found = []
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        for command, rest in COMMAND.findall(line.strip()):
            words = shlex.split(rest.replace(";", " ; "), comments=True)
            found.append((command, list(takewhile(lambda word: word not in END_OF_COMMAND, words))))
    return found


@pytest.fixture
def workplace(monkeypatch: pytest.MonkeyPatch, save_model: Callable[..., Path], tmp_path: Path) -> Target:
    """A folder with the files that the pages name, where every name of a model leads to a tiny one."""
    folder, load, tokenizer = save_model(), AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained
    load_target = Target.load
    target = load_target(folder)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name, **options: load(folder, **options))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, **options: tokenizer(folder, **options))
    monkeypatch.setattr(Target, "load", lambda name=None, **options: load_target(folder, **options))
    for module in (decode, decode.models.default_model):
        monkeypatch.setattr(module, "default_model", lambda: folder)
    for place in (tmp_path / "my-head", tmp_path / "pretrained" / "eagle3"):
        place.mkdir(parents=True)
        save_head(make_head("eagle3", target), place)
    for module in (heads, proposers.load):
        monkeypatch.setattr(module, "PRETRAINED", tmp_path / "pretrained", raising=False)
    monkeypatch.chdir(tmp_path)
    return target


def run_page(page: str) -> dict[str, Any]:
    """Run the page's Python blocks one after the other, with the names of those before.

    What `generate` calls the KV cache depends on the version of transformers; the pages have the newest name.
    """
    names: dict[str, Any] = {"__name__": "page"}
    for block in list_blocks(page, "python"):
        code = block.replace("cache=result.cache", f"{CACHE}=result.{CACHE}")
        exec(compile(code, page, "exec"), names)
    return names


@pytest.mark.parametrize("page", [page for page in PAGES if list_blocks(page, "python") and page != "README.md"])
def test_python_blocks_run(page: str, workplace: Target) -> None:
    run_page(page)


def test_the_readme_gives_plain_decodings_text(workplace: Target, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("README.md")
    prompt = names["inputs"]["input_ids"][0].tolist()
    plain = generate(workplace, [prompt], None, max_new_tokens=48)[0].tokens
    assert names["output"][0, len(prompt) :].tolist() == plain
    assert generate(workplace, ["Why is the sky blue?"], None)[0].text in capsys.readouterr().out.splitlines()
    proposer = names["BigramProposer"]()
    drafted = generate(workplace, ["abababab"], proposer, max_new_tokens=20)
    assert drafted[0].tokens == generate(workplace, ["abababab"], None, max_new_tokens=20)[0].tokens


@pytest.mark.parametrize(("name", "longest"), [("BigramProposer", 22), ("FrequentSource", 19)])
def test_proposers_of_ones_own_draft_and_change_nothing(name: str, longest: int) -> None:
    (code,) = [block for block in list_blocks("docs/proposers.md", "python") if f"class {name}" in block]
    target = Target(tiny("llama"), deterministic=True)
    names: dict[str, Any] = {"target": target, "generate": lambda *args, **settings: None}
    exec(code, names)
    proposer = names[name]() if name.endswith("Proposer") else names["proposer"]
    prompts = [[5, 6, 5, 6, 5], [8, 9]]
    plain = generate(target, prompts, None, max_new_tokens=30)
    drafted = generate(target, prompts, proposer, max_new_tokens=30)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert sum(answer.stats.nodes for answer in drafted) > 0
    assert len(code.splitlines()) <= longest


class Found(Exception):
    """Carries a parser out of a command's `main`."""


def find_parser(command: str) -> argparse.ArgumentParser:
    """The parser of a command, as its `main` uses it."""

    def catch(parser: argparse.ArgumentParser, *_: Any) -> Any:
        raise Found(parser)

    with patch.object(argparse.ArgumentParser, "parse_known_args", catch), pytest.raises(Found) as found:
        import_module(f"scripts.{command}").main([])
    return found.value.args[0]


def find_fault(command: str, words: list[str]) -> str:
    """The parser's error for these arguments. An outline (`train ... --resume`) only needs options that exist."""
    parser, errors = find_parser(command), io.StringIO()
    if any(word == "..." and not before.startswith("--") for before, word in pairwise(["", *words])):
        known = {option for action in parser._actions for option in action.option_strings}
        return ", ".join(word for word in words if word.startswith("--") and word not in known)
    with redirect_stderr(errors), suppress(SystemExit):
        parser.parse_args(words)
    return errors.getvalue()


@pytest.mark.parametrize("page", [page for page in PAGES if list_commands(page)])
def test_command_lines_have_options_that_exist(page: str) -> None:
    faults = [(command, words, find_fault(command, words)) for command, words in list_commands(page)]
    assert [fault for fault in faults if fault[2]] == []


def test_the_readme_shows_every_step_to_a_head() -> None:
    shown = {command for command, _ in list_commands("README.md")}
    assert shown >= {"distill", "train", "calibrate", "check", "generate"}


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for page in PAGES:
        for block in list_blocks(page, "sh"):
            assert set(re.findall(r"^make (\w+)", block, re.M)) <= targets


# The programs in examples/


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/*.py")), ids=lambda file: file.stem)
def test_examples_are_short(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) < 60


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps the number format of a process's first training; other tests train in another one."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_examples_run(
    save_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(save_model())
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nwhy?\n\nnot asked\n"))
    for name, text, count in (("generate_dropin", SAME, 1), ("own_proposer", SAME, 2), ("streaming_chat", "[tau ", 2)):
        import_module(f"examples.{name}").main(model)
        assert capsys.readouterr().out.count(text) == count
    import_module("examples.train_tiny_head").main(model, str(tmp_path))
    files = {path.name for path in (tmp_path / "my-head").iterdir()}
    assert files >= {"config.json", "model.safetensors", "calibration.json"}
    assert "tau" in capsys.readouterr().err
