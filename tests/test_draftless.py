"""The one name: what `import draftless` gives, the command, and the wheel in an environment that has no clone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from sysconfig import get_paths
from zipfile import ZipFile

import pytest

import decode
import draftless
import proposers
from tests.support.commands import Call
from training import rollouts

ROOT = Path(__file__).parents[1]


def test_the_public_names_are_those_of_the_packages() -> None:
    for package in (decode, proposers, rollouts):
        for name in package.__all__:
            assert getattr(draftless, name) is getattr(package, name)
            assert name in dir(draftless)
    assert not {*decode.__all__} & {*proposers.__all__}
    with pytest.raises(AttributeError, match="module 'draftless' has no attribute 'Targets'"):
        draftless.Targets  # noqa: B018


def test_a_star_imports_the_public_names() -> None:
    found: dict[str, object] = {}
    exec("from draftless import *", found)
    assert {*found} - {"__builtins__"} == {*decode.__all__, *proposers.__all__, *rollouts.__all__}


def test_the_name_alone_imports_no_torch() -> None:
    code = "import draftless, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("options", [[], ["--help"]])
def test_help_lists_the_commands(options: list[str], run_main: Call) -> None:
    out = run_main(draftless.main, *options).out
    assert all(f"  {path.stem} " in out for path in (ROOT / "scripts").glob("[!_]*.py"))
    assert max(map(len, out.splitlines())) <= 80


def test_a_wrong_command_gets_the_right_one(run_main: Call) -> None:
    run_main(draftless.main, "trian").refused("there is no command 'trian'; did you mean train?")


@pytest.mark.slow
def test_the_wheel_answers_where_there_is_no_clone(save_model: Callable[..., Path], tmp_path: Path) -> None:
    """In an environment with the requirements of this one, but without its link to the clone."""
    clone = tmp_path / "clone"  # a build writes files into its folder
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".*", "tests", "docs", "build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    built = [*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(clone)]
    subprocess.run(built, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("draftless-*.whl")
    names = {name.split("/")[0] for name in ZipFile(wheel).namelist()}
    assert {each for each in names if not each.endswith(".dist-info")} == {
        *("decode", "draftless.py", "draftless_commands", "heads", "proposers", "training")
    }
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "requirements.pth").write_text(get_paths()["purelib"])
    installed = [*pip, "--python", str(place), "install", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    subprocess.run(installed, check=True, capture_output=True)
    shutil.rmtree(clone)
    work = tmp_path / "empty"
    work.mkdir()
    asked = ["generate", "--model", str(save_model()), "--prompt", "a b a b", "--json", "--max-new-tokens", "8"]
    for proposer in ("none", "auto"):
        command = [str(place / "bin" / "draftless"), *asked, "--proposer", proposer]
        run = subprocess.run(command, cwd=work, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert json.loads(run.stdout)["tokens"]
    where = [
        str(place / "bin" / "python"),
        "-c",
        "import decode, heads, draftless_commands, training; print(decode.__file__)",
    ]
    assert str(site) in subprocess.run(where, cwd=work, capture_output=True, text=True, check=True).stdout
