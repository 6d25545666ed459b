"""README and docs: links lead somewhere, tables agree with the code and with what was measured."""

from __future__ import annotations

import json
import re
from inspect import signature
from pathlib import Path

import pytest

import decode
import proposers
from tests.decode.models.test_architectures import ACCEPTED, REFUSED
from tests.test_snippets import FENCE, PAGES, ROOT

LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
TERMS = """
target, proposer, head, features, logits, output layer, output matrix, draft vocabulary, token map, draft token,
draft tree, node, root, path, chain, level, depth, width, kv cache, committed token, verify, accept, bonus token, step,
prefill, tau, request id, row, attention window, draft budget, cost curve, warm-up, calibration
"""


def read_prose(page: str) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", PAGES[page])


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def list_anchors(page: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", read_prose(page), re.M)
    return {anchor(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)) for title in titles}


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


def test_every_page_is_linked_from_the_readme() -> None:
    links = set(LINK.findall(read_prose("README.md")))
    assert {page for page in PAGES if page.startswith("docs/")} <= links


def test_the_readme_is_short() -> None:
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120


def test_every_term_is_explained() -> None:
    words = read_prose("docs/architecture.md").partition("## Words")[2]
    explained = {word.lower() for word in re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", words)}
    for word in re.split(r",\s", TERMS.strip()):
        assert {word, f"{word}s"} & explained, word


def read_table(page: str, head: str) -> list[list[str]]:
    """The cells of a page's table that begins with this head."""
    lines = PAGES[page].partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().split(" [")[0] for cell in line.split("|")[1:-1]] for line in lines]


def test_the_results_are_those_that_were_measured() -> None:
    rows = json.loads((ROOT / "docs" / "results" / "methods-cpu.json").read_text(encoding="utf-8"))["rows"]
    formats = {"tau": "{:.2f}", "tokens_per_second": "{:.1f}", "speedup_vs_hf": "{:.2f}x", "speedup_vs_none": "{:.2f}x"}
    measured = {
        row["method"]: [shape.format(row[name]) for name, shape in formats.items()]
        for row in rows
        if row["category"] == "all"
    }
    shown = read_table("docs/performance.md", "| method | tau | tokens/s | vs `hf` | vs `none` |")
    assert len(shown) >= 8
    for name, *cells in shown:
        assert cells[:4] == measured[name.strip("`")]
    headline = read_table("README.md", "| SmolLM2-135M-Instruct, greedy | tau |")
    for method, (_, tau, speed, speculation, whole) in zip(("hf", "none", "merged", "auto"), headline, strict=True):
        assert [tau, speed, whole, speculation or measured[method][3]] == measured[method]


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
