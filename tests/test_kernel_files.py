"""Kernels are compiled once, kept, and found again; what goes wrong is said and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import decode.cpu.kernel_cache
from decode.cpu.kernel_cache import Kernel, Recipe, obtain_kernels
from tests.models import needs_compiler


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(decode.cpu.kernel_cache, "kernel_folder", lambda: tmp_path / "kernels")
    forget(monkeypatch)
    return tmp_path / "kernels"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if in another process."""
    monkeypatch.setattr(decode.cpu.kernel_cache, "_LOADED", {})


def doubling(*identity: str) -> Recipe:
    """Adds its second input to the first one, and returns twice the sum."""

    def compute(inputs: list[Tensor]) -> list[Tensor]:
        first, second = inputs
        first += second
        return [first * 2]

    return Recipe(("doubling", *identity), compute, [torch.empty(3, 8), torch.empty(8)], [(0,), ()])


def branching() -> Recipe:
    """What cannot be exported."""
    return Recipe(("branching",), lambda inputs: inputs if inputs[0].sum() > 0 else [], [torch.empty(3)], [()])


def build_at_once(monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> list[str]:
    """Replace the compiler by one that writes such a file, or fails."""
    built: list[str] = []

    def build(shares: list[list[str]]) -> Iterator[str]:
        for name in (name for share in shares for name in share):
            built.append(name)
            if content is None:
                Path(name, "failure.txt").write_text("CompileError: no headers")
            else:
                Path(name, "kernel.pt2").write_bytes(content)
            yield name

    monkeypatch.setattr(decode.cpu.kernel_cache, "_build", build)
    return built


@needs_compiler
def test_a_kernel_is_compiled_once_and_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, twin, failing = obtain_kernels([doubling(), doubling(), branching()])
    assert isinstance(first, Kernel.__origin__) and first is twin and isinstance(failing, str)
    for rows in (3, 50):  # any number of rows
        changed = torch.ones(rows, 8)
        (found,) = first([changed, torch.arange(8.0)])
        assert torch.equal(changed, torch.arange(1.0, 9.0).expand(rows, 8)) and torch.equal(found, changed * 2)
    assert {path.suffix for path in folder.iterdir()} == {".pt2", ".failed", ""}  # and the lock
    forget(monkeypatch)
    monkeypatch.delattr(decode.cpu.kernel_cache, "_make")
    (kept,) = obtain_kernels([doubling()])
    assert not isinstance(kept, str) and torch.equal(kept([torch.ones(1, 8), torch.zeros(8)])[0], torch.full((1, 8), 2))


def test_each_identity_has_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {doubling().path, doubling("other").path}
    torch.set_default_dtype(torch.float64)
    try:
        paths.add(doubling().path)
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(decode.cpu.kernel_cache, "_machine", lambda: "another")
    paths.add(doubling().path)
    assert len(paths) == 4


def test_what_failed_is_said_and_tried_again_only_if_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_at_once(monkeypatch, None)
    for again, count in ((False, 1), (False, 1), (True, 2)):
        assert obtain_kernels([doubling()], again=again) == ["CompileError: no headers"]
        assert len(built) == count
    assert not (folder / "making").exists()


def test_a_damaged_kernel_is_compiled_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    doubling().path.write_bytes(b"damaged")
    built = build_at_once(monkeypatch, b"damaged, too")
    assert obtain_kernels([doubling()]) == ["what was compiled cannot be loaded"]
    assert len(built) == 1 and not doubling().path.exists()


def test_a_compiler_that_is_killed_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killed = tmp_path / "killed.py"
    killed.write_text("import sys; print(sys.argv[1], flush=True); sys.exit(137)")
    monkeypatch.setattr(decode.cpu.kernel_cache, "BUILDER", killed)
    assert [*decode.cpu.kernel_cache._build([["a", "b"], []])] == ["a", "b"]


def test_an_interrupt_ends_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import sys, time; print(sys.argv[1], flush=True); time.sleep(60)")
    monkeypatch.setattr(decode.cpu.kernel_cache, "BUILDER", slow)
    building = decode.cpu.kernel_cache._build([["a", "b"]])
    assert next(building) == "a"
    begun = time.perf_counter()
    building.close()
    assert time.perf_counter() - begun < 30


def test_a_folder_that_cannot_be_written_is_an_error(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(OSError, match="kernels"):
        obtain_kernels([doubling()])


def test_importing_the_library_does_not_import_the_compiler() -> None:
    code = "import decode, sys; sys.exit('torch._inductor.compile_fx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": "."}).returncode == 0
