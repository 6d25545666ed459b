"""README, docs and examples: links lead somewhere, tables are right, code runs, command lines have known options."""

from __future__ import annotations

import argparse
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import getsource, signature
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import transformers
from accelerate.state import AcceleratorState
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer

import decode
import decode.models.default_model
import heads
import proposers
import proposers.load
import proposers.options
from decode import Target, generate
from decode.devices.cost_curve import CostCurve
from decode.requests.answer import Limits, LogProbs
from draftless import COMMANDS
from heads import save_head
from tests.decode.models.test_architectures import ACCEPTED, REFUSED
from tests.support.drafting import make_head
from tests.support.models import CACHE, tiny

ROOT = Path(__file__).parent.parent
FOLDERS = ("*.md", "docs/*.md", "heads/pretrained/*/*/README.md")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for folder in FOLDERS for path in ROOT.glob(folder)
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
INDENTED = re.compile(r"(?:^    .*\n)+", re.M)
ELSEWHERE = (
    "README.md",
    "docs/rollouts.md",
    "docs/serve.md",
    "docs/structured-output.md",
)  # run below, or by slow tests
SAME = "the same tokens as plain decoding: True\n"
COMMAND = re.compile(rf"(?:^|[ (])draftless ({'|'.join(COMMANDS)})\b(.*)")
END_OF_COMMAND = {">", "|", ";", "&&", "done", "do"}
RULE = re.compile(r"\|(?: *:?-+:? *\|)+")  # the line between a table's head and its rows
LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
TASKS = {"MT-bench": "mt_bench", "questions": "qa", "maths": "math_reasoning", "RAG": "rag"}  # names in results
HEADS = ("medusa", "hydra", "eagle", "eagle3")
TERMS = """
target, proposer, head, features, logits, output layer, output matrix, draft vocabulary, token map, draft token,
draft tree, node, root, path, chain, level, depth, width, kv cache, committed token, verify, accept, bonus token, step,
prefill, tau, request id, row, attention window, draft budget, cost curve, warm-up, calibration
"""


def read_prose(page: str) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", PAGES[page])


def list_anchors(page: str) -> set[str]:
    """GitHub's anchors of the headings."""
    headings = re.findall(r"^#+ (.*)$", read_prose(page), re.M)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    broken = []
    for link in LINK.findall(read_prose(page)):
        if link.startswith(("https://", "http://")):
            continue
        place, _, heading = link.partition("#")
        file = ((ROOT / page).parent / place).resolve() if place else ROOT / page
        if not file.exists() or (heading and heading not in list_anchors(str(file.relative_to(ROOT)))):
            broken.append(link)
    assert broken == []


def list_tables(page: str) -> list[list[str]]:
    """The lines of each block with a line of a table: such a block is the table alone."""
    blocks = [block.strip("\n").splitlines() for block in re.split(r"\n[ \t]*\n", read_prose(page))]
    return [block for block in blocks if any(line.startswith("|") or RULE.search(line) for line in block)]


def count_cells(row: str) -> int:
    """As GitHub splits a row: at every bar that no backslash escapes, in code too."""
    return len(re.findall(r"(?<!\\)\|", row)) - 1


@pytest.mark.parametrize("page", [page for page in PAGES if list_tables(page)])
def test_tables_have_a_head_a_rule_and_rows_of_as_many_cells(page: str) -> None:
    faults = []
    for table in list_tables(page):
        head, rule = [*table, ""][:2]
        faults += [] if RULE.fullmatch(rule) and not RULE.search(head) else [head]
        faults += [row for row in table if count_cells(row) != count_cells(head) or row[-1:] != "|"]
    assert faults == []


def test_every_page_is_linked_from_the_readme_or_from_such_a_page() -> None:
    links = set(LINK.findall(read_prose("README.md"))) & {*PAGES}
    links |= {f"docs/{link.partition('#')[0]}" for page in links for link in LINK.findall(read_prose(page))}
    assert {page for page in PAGES if page.startswith("docs/")} <= links


def test_the_readme_is_short() -> None:
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120


def test_every_term_is_explained() -> None:
    words = read_prose("docs/architecture.md").partition("## Words")[2]
    explained = {word.lower() for word in re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", words)}
    for word in re.split(r",\s", TERMS.strip()):
        assert {word, f"{word}s"} & explained, word


def read_table(page: str, head: str, section: str = "") -> list[list[str]]:
    """The cells of a page's first table that begins with this head, in the section whose title ends so."""
    after = PAGES[page].partition(f"{section}\n")[2]
    lines = after.partition(head)[2].partition("\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip().split(" [")[0] for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.parametrize(("file", "section"), [("methods-blocks-cpu", "All methods"), ("methods-cpu", "in float32")])
def test_the_results_are_those_that_were_measured(file: str, section: str) -> None:
    rows = json.loads((ROOT / "docs" / "results" / f"{file}.json").read_text(encoding="utf-8"))["rows"]
    formats = {"tau": "{:.2f}", "tokens_per_second": "{:.1f}", "speedup_vs_hf": "{:.2f}x", "speedup_vs_none": "{:.2f}x"}
    measured = {
        row["method"]: [shape.format(row[name]) for name, shape in formats.items()]
        for row in rows
        if row["category"] == "all"
    }
    shown = read_table("docs/performance.md", "| method | tau | tokens/s | vs `hf` | vs `none` |", section)
    assert len(shown) >= 8
    for name, *cells in shown:
        assert cells[:4] == measured[name.strip("`")]
    if file == "methods-blocks-cpu":
        by_task = {
            (row["category"], row["method"]): f"{row['speedup_vs_none']:.2f}x ({row['tau']:.2f})" for row in rows
        }
        head = re.search(r"^\| task \|.*", PAGES["docs/performance.md"], re.M)[0]  # type: ignore[index]
        methods = re.findall(r"`([\w-]+)`", head)
        assert len(methods) >= 6
        for task, *cells in read_table("docs/performance.md", head):
            assert cells == [by_task[TASKS.get(task, task), method] for method in methods]
        headline = read_table("README.md", "| SmolLM2-135M-Instruct, GGUF, greedy | tau |")
        for method, (_, tau, speed, speculation, whole) in zip(
            ("hf", "none", "ngram", "merged", "auto"), headline, strict=True
        ):
            assert [tau, speed, whole, speculation or measured[method][3]] == measured[method]
    best = max((name for name in measured if name in HEADS), key=lambda name: float(measured[name][3][:-1]))
    gains = [measured["none"][2], *(measured[name][3] for name in ("ngram", "merged", "auto", best))]
    assert gains in [cells for _, *cells in read_table("README.md", "| the same model's weights |")]


def test_the_costs_of_recurrent_models_are_those_that_were_measured() -> None:
    found = json.loads((ROOT / "docs" / "results" / "recurrent.json").read_text(encoding="utf-8"))
    columns = "1 nodes", "4 nodes", "8 nodes", "4 nodes after 4 given"
    for row, *cells in read_table("docs/recurrent.md", "| milliseconds of a pass |"):
        assert cells == [f"{found['milliseconds'][f'{row.split()[0]} x {name}']:.1f}" for name in columns]
    for name, rate, ratio, _ in read_table("docs/recurrent.md", "| | tokens/s | relative | tau |"):
        measured = found["text"][name.strip("`")]
        assert (rate, ratio) == (f"{measured:.1f}", f"{measured / found['text']['plain']:.2f}")


def test_the_table_of_two_paths_is_what_was_measured() -> None:
    found = json.loads((ROOT / "docs" / "results" / "two-leaves.json").read_text(encoding="utf-8"))
    measured = [found["4 nodes"], found["8 nodes"]]
    gains = [[f"{each['tau'][1] / each['tau'][0]:.2f}" for each in measured]]
    gains += [[f"{each[model][0]:.2f}" for each in measured] for model in ("qwen3_5_text", "lfm2")]
    assert [cells for _, *cells in read_table("docs/recurrent.md", "| two paths, relative to one |")] == gains


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "results").glob("*.json")), ids=lambda file: file.stem)
def test_results_name_their_commit(file: Path) -> None:
    report = json.loads(file.read_text(encoding="utf-8"))
    commit = report.get("commit") or report["settings"]["commit"]
    assert re.fullmatch(r"[0-9a-f]{7,40}", commit)


def test_every_public_name_and_setting_is_documented() -> None:
    page = PAGES["docs/python-api.md"]
    names = [*decode.__all__, *proposers.__all__]
    assert [name for name in names if not re.search(rf"`[^`]*\b{name}\b[^`]*`", page)] == []
    settings = {*signature(decode.stream).parameters, *signature(decode.Sampling).parameters} - {"unknown"}
    assert [name for name in settings if name not in page] == []


FIELDS = {CostCurve: ("sizes", "seconds", "ratios")}  # a public class without declared fields


def list_classes() -> list[type]:
    """The public classes with fields, and those that their fields hold."""
    public = [getattr(module, name) for module in (decode, proposers) for name in module.__all__]
    return [each for each in public if is_dataclass(each) or hasattr(each, "_fields")] + [Limits, LogProbs, CostCurve]


@pytest.mark.parametrize("found", list_classes(), ids=lambda found: found.__name__)
def test_help_explains_each_field(found: Any) -> None:
    """`help` shows the docstring, and no comments. An entry: `name: ...`, `name [B, N]: ...` or `one, other: ...`."""
    names = FIELDS.get(found) or getattr(found, "_fields", None) or [field.name for field in fields(found)]
    entry = r"\b{}(?: ?\[[^\]]*\])*(?: \w+)?(?:, \w+)*:"
    assert [name for name in names if not re.search(entry.format(name), found.__doc__)] == []
    lines = getsource(found).partition('"""')[2].partition('"""')[2].partition("    def ")[0].splitlines()
    assert [line for line in lines if re.match(r"    \w+: .*#(?! noqa)", line)] == []  # not said twice


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="older ones have fewer architectures")
def test_the_table_of_models_is_that_of_the_tests() -> None:
    page = PAGES["docs/models.md"]
    accepted, refused = (
        re.search(rf"^## {title}\n(.*?)^## ", page, re.M | re.S).group(1)  # type: ignore[union-attr]
        for title in ("Tested architectures", "Refused")
    )
    shown = "".join(re.findall(r"^\|.*", accepted, re.M))
    assert set(re.findall(r"`([\w-]+)`", shown)) == {name.split()[0] for name in ACCEPTED}
    shown = "".join(re.findall(r"^\|[^|]*", refused, re.M))
    assert set(re.findall(r"`([\w-]+)`", shown)) == {name.split()[0] for name in REFUSED}
    assert f"{len({name.split()[0] for name in ACCEPTED})} decoder-only architectures" in read_prose("README.md")


# Code blocks and command lines


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
    for module in (heads, proposers.load, proposers.options):
        monkeypatch.setattr(module, "PRETRAINED", tmp_path / "pretrained", raising=False)
    monkeypatch.chdir(tmp_path)
    return target


def run_page(page: str, **given: Any) -> dict[str, Any]:
    """Run the page's Python blocks one after the other, with the names of those before.

    What `generate` calls the KV cache depends on the version of transformers; the pages have the newest name.
    """
    names: dict[str, Any] = {"__name__": "page"} | given
    for block in list_blocks(page, "python"):
        code = block.replace("cache=result.cache", f"{CACHE}=result.{CACHE}")
        exec(compile(code, page, "exec"), names)
    return names


@pytest.mark.parametrize("page", [page for page in PAGES if list_blocks(page, "python") and page not in ELSEWHERE])
def test_python_blocks_run(page: str, workplace: Target) -> None:
    run_page(page)


def test_the_page_of_rollouts_attaches_them() -> None:
    trainer = Mock()
    run_page("docs/rollouts.md", trainer=trainer)
    assert trainer.model.generate.__module__ == "training.rollouts" and trainer.train.called


def test_the_readme_gives_plain_decodings_text(workplace: Target, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("README.md")
    prompt = names["inputs"]["input_ids"][0].tolist()
    plain = generate(workplace, [prompt], None, max_new_tokens=48)[0].tokens
    assert names["output"][0, len(prompt) :].tolist() == plain
    assert generate(workplace, ["Why is the sky blue?"], None)[0].text in capsys.readouterr().out.splitlines()
    proposer = names["BigramProposer"]()
    drafted = generate(workplace, ["abababab"], proposer, max_new_tokens=20)
    assert drafted[0].tokens == generate(workplace, ["abababab"], None, max_new_tokens=20)[0].tokens


OWN = [("README.md", "BigramProposer", 22), ("docs/proposers.md", "FrequentSource", 19)]


@pytest.mark.parametrize(("page", "name", "longest"), OWN)
def test_proposers_of_ones_own_draft_and_change_nothing(page: str, name: str, longest: int) -> None:
    (code,) = [block for block in list_blocks(page, "python") if f"class {name}" in block]
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
        import_module(f"draftless_commands.{command}").main([])
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
    assert len(file.read_text(encoding="utf-8").splitlines()) < 100


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


@pytest.mark.usefixtures("fresh_accelerate")
def test_the_example_with_trl_runs(save_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    import_module("examples.grpo_rollouts").main(str(save_model()), 2)
    assert capsys.readouterr().out.count(", tau ") == 2
