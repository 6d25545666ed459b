"""README and docs: links lead somewhere, generated pages are current, tables agree with the code, words are plain."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from docs.make_pages import FOLDERS, anchor, list_files, make_pages
from tests.decode.models.test_architectures import ACCEPTED, REFUSED

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("heads/pretrained/*/*/README.md")])
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
TERMS = (
    *(
        "target",
        "proposer",
        "head",
        "features",
        "logits",
        "output layer",
        "output matrix",
        "draft vocabulary",
        "token map",
    ),
    *("draft token", "draft tree", "node", "root", "path", "chain", "level", "depth", "width", "kv cache"),
    *("committed token", "verify", "accept", "bonus token", "step", "prefill", "tau", "request id", "row"),
    *("attention window", "draft budget", "cost curve", "warm-up", "calibration"),
)
AGAIN = "run: python docs/make_pages.py"


def read_prose(page: Path) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def list_anchors(page: Path) -> set[str]:
    return {
        anchor(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title))
        for title in re.findall(r"^#+ (.*)$", read_prose(page), re.M)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for link in LINK.findall(read_prose(page)):
        if link.startswith(("https://", "http://")):
            continue
        place, _, heading = link.partition("#")
        file = (page.parent / place).resolve() if place else page
        if not file.exists() or (heading and heading not in list_anchors(file)):
            broken.append(link)
    assert broken == []


def test_every_page_is_linked_from_the_readme() -> None:
    links = set(LINK.findall(read_prose(ROOT / "README.md")))
    assert {str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md")} <= links


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_readme_explains_every_term() -> None:
    glossary = read_prose(ROOT / "README.md").partition("## How it works")[2]
    explained = {word.lower() for word in re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", glossary)}
    for word in TERMS:
        assert {word, f"{word}s"} & explained, word


@pytest.mark.parametrize("file", ["README.md", "docs/performance.md"])
def test_the_results_are_those_that_were_measured(file: str) -> None:
    rows = json.loads((ROOT / "docs" / "results" / "methods-cpu.json").read_text(encoding="utf-8"))["rows"]
    text = (ROOT / file).read_text(encoding="utf-8")
    table = text[text.index("| method | tau | tokens/s | vs `hf` | vs `none` |") :].partition("\n\n")[0]
    shown = {}
    for line in table.splitlines()[2:]:
        method, tau, speed, *ratios = (cell.strip() for cell in line.split("|")[1:6])
        shown[method.split("`")[1]] = (tau, speed, *(ratio.split()[0] for ratio in ratios))
    measured = {
        row["method"]: (
            f"{row['tau']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup_vs_hf']:.2f}x",
            f"{row['speedup_vs_none']:.2f}x",
        )
        for row in rows
        if row["category"] == "all"
    }
    assert shown.items() <= measured.items()
    assert len(shown) >= 8 if file == "README.md" else shown == measured


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "results").glob("*.json")), ids=lambda file: file.stem)
def test_results_name_their_commit(file: Path) -> None:
    report = json.loads(file.read_text(encoding="utf-8"))
    commit = report.get("commit") or report["settings"]["commit"]
    assert re.fullmatch(r"[0-9a-f]{7,40}", commit)


@pytest.mark.parametrize("page", ["python-api.md", "cli.md", "architecture.md", "generate.md"])
def test_generated_pages_are_current(page: str) -> None:
    written = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    made = make_pages()[page].splitlines()
    old, new = sorted({*written} - {*made}), sorted({*made} - {*written})
    assert (old, new) == ([], []), AGAIN
    assert written == made, AGAIN


def test_the_file_tree_has_every_file() -> None:
    """Lists what is missing and what no longer exists."""
    (tree,) = re.findall(
        r"<!-- tree -->\n```text\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text("utf-8"), re.S
    )
    shown, folder = set(), ""
    for line in filter(None, tree.splitlines()):
        name = line.split()[0]
        if line.startswith("  "):
            shown.add(f"{folder}{name}")
        else:
            folder = name
    actual = {str(path) for path in list_files() if path.name != "__init__.py"}
    assert (sorted(actual - shown), sorted(shown - actual)) == ([], []), AGAIN


def test_every_file_says_what_it_holds() -> None:
    silent = [str(path) for path in list_files() if not ast.get_docstring(ast.parse((ROOT / path).read_text("utf-8")))]
    assert [path for path in silent if path.startswith(FOLDERS)] == []


def test_the_table_of_models_is_that_of_the_tests() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    accepted, refused = (
        re.search(rf"^## {title}\n(.*?)^## ", page, re.M | re.S).group(1)  # type: ignore[union-attr]
        for title in ("Tested architectures", "Refused")
    )
    rows = "".join(line for line in accepted.splitlines(keepends=True) if line.startswith("|"))
    assert set(re.findall(r"`([\w-]+)`", rows)) == {name.split()[0] for name in ACCEPTED}
    rows = "".join(line.split("|")[1] for line in refused.splitlines() if line.startswith("|"))
    assert set(re.findall(r"`([\w-]+)`", rows)) == {name.split()[0] for name in REFUSED}
    assert f"{len({name.split()[0] for name in ACCEPTED})} decoder-only architectures" in read_prose(ROOT / "README.md")


def test_distributions_have_their_usual_name() -> None:
    word = re.compile(r"\bla" + r"ws?\b", re.I)
    files = [ROOT / path for path in list_files()]
    files += [page for page in PAGES if page.name != "CHANGELOG.md"]
    files += [ROOT / name for name in ("Makefile", "pyproject.toml")]
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if word.search(line)
    ]
    assert found == []
