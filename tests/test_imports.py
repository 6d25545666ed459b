"""Who imports whom: the direction of every import between the packages at the root, read with `ast`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"decode", "heads", "proposers", "training", "scripts", "tests"}
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
