"""Packages: who imports whom (read with `ast`), no circles, small folders, and a purpose for each folder and file."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"decode", "draftless", "draftless_commands", "heads", "proposers", "scripts", "training", "tests"}
INSTALLED = {"scripts": "draftless_commands"}  # folders that have another name in imports
MAY_IMPORT = {
    "decode": set(),
    "heads": set(),
    "proposers": {"decode", "heads"},
    "training": {"decode", "heads"},
    "scripts": {"decode", "heads", "proposers", "training"},
}
# Of `decode`'s folders, from the bottom: each imports those before it. "decode" is the core.
LAYERS = ["decode/devices", "decode/requests", "decode/weights", "decode/weights/gguf", "decode/models"]
LAYERS += ["decode/trees", "decode/grammars", "decode", "decode/cpu", "decode/cuda", "decode/hf"]
FILES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for package in MAY_IMPORT
    for path in sorted((ROOT / package).rglob("*.py"))
}


def list_imports(source: str) -> Iterator[tuple[int, str, list[str]]]:
    """Of each absolute import, wherever in the file it stands: line, module, and the names taken from it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value), []


def find_breaches(package: str, source: str) -> list[tuple[int, str]]:
    """Line and name of each package that a file of this one must not import."""
    forbidden = PACKAGES - MAY_IMPORT[package] - {INSTALLED.get(package, package)}
    imports = [(line, module.split(".")[0]) for line, module, _ in list_imports(source)]
    return [(line, name) for line, name in imports if name in forbidden]


def list_folders(source: str) -> Iterator[str]:
    """The folder of each module of `decode` that a file imports, also within functions."""
    for _, module, names in list_imports(source):
        for path in map(Path, (module.replace(".", "/"), *(f"{module}.{name}".replace(".", "/") for name in names))):
            if path.parts[0] == "decode" and (path.with_suffix(".py") in FILES or path / "__init__.py" in FILES):
                yield str(path if path / "__init__.py" in FILES else path.parent)


def test_folders_of_decode_import_those_below() -> None:
    """So they form no circle, and the core knows no backend: what all devices share is in `decode.devices`."""
    assert {str(path.parent) for path in FILES if path.parts[0] == "decode"} == {*LAYERS}
    for path, source in FILES.items():
        if path.parts[0] == "decode" and path != Path("decode/__init__.py"):
            folder = str(path.parent)
            above = {*LAYERS[LAYERS.index(folder) + 1 :]} & {*list_folders(source)}
            assert not above, f"{path} imports {above}"


def test_imports_keep_their_direction():
    breaches = {path: find_breaches(path.parts[0], source) for path, source in FILES.items()}
    assert {path: found for path, found in breaches.items() if found} == {}
    source = "import math, decode\ndef f():\n    from training import data\nimport_module('proposers.medusa')"
    assert {*find_breaches("heads", source)} == {(1, "decode"), (3, "training"), (4, "proposers")}


def find_circle(sources: dict[str, str]) -> list[str]:
    """The modules of a circle of imports, the first again at its end; empty if there is none."""
    graph: dict[str, set[str]] = {}
    for importer, source in sources.items():
        found: set[str] = set()
        for _, module, names in list_imports(source):
            members = [f"{module}.{name}" for name in names] or [module]
            found.update(member if member in sources else module for member in members)
        graph[importer] = found & {*sources} - {importer}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def name_module(path: Path) -> str:
    """As it is imported."""
    first, *rest = path.with_suffix("").parts
    return ".".join([INSTALLED.get(first, first), *rest]).removesuffix(".__init__")


def test_imports_form_no_circle() -> None:
    assert find_circle({name_module(path): source for path, source in FILES.items()}) == []
    assert find_circle({"a": "from a.b import B", "a.b": "def f():\n    from a import name"})


def test_every_file_says_what_it_holds_and_every_folder_its_purpose_in_one_line() -> None:
    """A folder without `__init__.py` would be missing from the wheel."""
    inits = {path.parent / "__init__.py" for path in FILES}
    texts = {path: ast.get_docstring(ast.parse(FILES.get(path, ""))) for path in {*FILES, *inits}}
    assert [path for path, text in texts.items() if not text or (path in inits and "\n" in text)] == []


def test_every_folder_is_in_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = {str(path.parent) for path in FILES}
    assert [folder for folder in sorted(folders) if f"| `{folder}` |" not in page] == []
    assert [name for name in re.findall(r"^\| `([\w/]+)` \|", page, re.M) if "/" in name and name not in folders] == []


@pytest.mark.parametrize(("folder", "most"), [*((folder, 16) for folder in MAY_IMPORT), ("tests", 25)])
def test_no_folder_is_crowded(folder: str, most: int) -> None:
    crowded = Counter(path.parent for path in (ROOT / folder).rglob("*.py"))
    assert crowded and [str(each) for each, count in crowded.items() if count > most] == []


def test_the_wheel_has_every_folder_and_no_package_called_scripts() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert settings["packages"] == sorted({name_module(path.parent) for path in FILES})
    assert settings["package-dir"] == {name: folder for folder, name in INSTALLED.items()}
    assert {name.split(".")[0] for name in settings["package-data"]} <= {*settings["packages"]}
