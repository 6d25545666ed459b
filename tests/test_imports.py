"""Who imports whom, read with `ast`: the direction between packages, no circles, and a purpose for every folder."""

import ast
from collections.abc import Container
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"decode", "draftless", "heads", "proposers", "training", "scripts", "tests"}
MAY_IMPORT = {
    "decode": set(),
    "heads": set(),
    "proposers": {"decode", "heads"},
    "training": {"decode", "heads"},
    "scripts": {"decode", "heads", "proposers", "training"},
}


def list_imports(source: str) -> list[tuple[int, str]]:
    """The line and root package of each absolute import, wherever in the file it stands."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.lineno, node.module))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__"):
                found.append((node.lineno, str(node.args[0].value)))
    return [(line, name.split(".")[0]) for line, name in found]


def find_breaches(package: str, source: str, file: str) -> list[str]:
    forbidden = PACKAGES - MAY_IMPORT[package] - {package}
    return [f"{file}:{line} imports {name}" for line, name in list_imports(source) if name in forbidden]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_keep_their_direction(package):
    breaches = []
    for path in sorted((ROOT / package).rglob("*.py")):
        breaches += find_breaches(package, path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    assert breaches == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_every_folder_is_a_package_and_so_part_of_the_wheel(package):
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_files_are_found():
    assert list((ROOT / "decode").rglob("*.py"))


@pytest.mark.parametrize(
    ("package", "source", "names"),
    [
        ("decode", "import torch\nfrom decode.tree import Tree\nfrom .cache import Cache", []),
        ("decode", "import proposers.ngram as ngram", ["proposers"]),
        ("decode", "def load():\n    from heads.eagle import Eagle", ["heads"]),
        ("decode", "if TYPE_CHECKING:\n    from training import train", ["training"]),
        ("decode", "import importlib\nimportlib.import_module('heads.medusa')", ["heads"]),
        ("heads", "import math, decode", ["decode"]),
        ("proposers", "from heads.eagle import Eagle\nfrom decode.tree import Tree", []),
        ("proposers", "from training.loss import distil", ["training"]),
        ("training", "from heads import medusa\nimport decode\nfrom proposers import medusa", ["proposers"]),
        ("scripts", "import decode, heads, proposers, training\nfrom tests import tiny", ["tests"]),
    ],
)
def test_the_checker_catches_a_broken_direction(package, source, names):
    breaches = find_breaches(package, source, "made_up.py")
    assert [breach.split()[-1] for breach in breaches] == names


def name_module(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_imports(source: str, modules: Container[str]) -> set[str]:
    """Those of the modules that a file imports, wherever in it. `from package import module` leads to the module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in modules else node.module for name in names)
    return {name for name in found if name in modules}


def find_circle(sources: dict[str, str]) -> list[str]:
    """The modules of a circle of imports, the first again at its end; empty if there is none."""
    try:
        TopologicalSorter({name: find_imports(source, sources) - {name} for name, source in sources.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_form_no_circle() -> None:
    paths = [path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py")]
    assert find_circle({name_module(path): path.read_text(encoding="utf-8") for path in paths}) == []


@pytest.mark.parametrize(
    ("sources", "is_circle"),
    [
        ({"a": "", "a.b": "import a.c", "a.c": "import a.d", "a.d": ""}, False),
        ({"a.b": "import a.c", "a.c": "from a.b import name"}, True),
        ({"a.b": "from a import c", "a.c": "def f():\n    import a.b"}, True),
        ({"a.b": "if TYPE_CHECKING:\n    from a.c import C", "a.c": "from a.b import B"}, True),
        ({"a": "from a.b import B", "a.b": "from a import name"}, True),
        ({"a": "from a.b import B", "a.b": "from a import c", "a.c": ""}, False),
    ],
)
def test_the_checker_finds_circles(sources: dict[str, str], is_circle: bool) -> None:
    assert bool(find_circle(sources)) == is_circle


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_every_folder_states_its_purpose_in_one_line(package: str) -> None:
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    silent = []
    for folder in folders:
        init = folder / "__init__.py"
        purpose = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) if init.exists() else None
        if not purpose or len(purpose.splitlines()) != 1:
            silent.append(str(folder.relative_to(ROOT)))
    assert silent == []
