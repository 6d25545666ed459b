"""Kernels are compiled once, kept in the cache and found again. Failures are reported and leave nothing behind."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import decode.cpu.kernel_cache
import decode.cpu.kernel_source
from decode.cpu.kernel_cache import Kernel, obtain_kernels
from decode.cpu.kernel_source import KernelSource, describe_module, name_kernel
from tests.models import needs_compiler


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(decode.cpu.kernel_cache, "kernel_folder", lambda: tmp_path / "kernels")
    forget(monkeypatch)
    return tmp_path / "kernels"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act like another process."""
    monkeypatch.setattr(decode.cpu.kernel_cache, "_LOADED", {})


def doubling(*description: str) -> KernelSource:
    """Adds its second input to the first one, and returns twice the sum."""

    def compute(inputs: list[Tensor]) -> list[Tensor]:
        first, second = inputs
        first += second
        return [first * 2]

    return KernelSource(("doubling", *description), compute, [torch.empty(3, 8), torch.empty(8)], [(0,), ()])


def branching() -> KernelSource:
    """Cannot be exported."""
    return KernelSource(("branching",), lambda inputs: inputs if inputs[0].sum() > 0 else [], [torch.empty(3)], [()])


def build_at_once(monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> list[str]:
    """Replace the compiler by one that writes this file, or fails. Returns the folders that it has compiled."""
    built: list[str] = []

    def run_compilers(shares: list[list[str]]) -> Iterator[str]:
        for name in (name for share in shares for name in share):
            built.append(name)
            if content is None:
                Path(name, "failure.txt").write_text("CompileError: no headers")
            else:
                Path(name, "kernel.pt2").write_bytes(content)
            yield name

    monkeypatch.setattr(decode.cpu.kernel_cache, "_run_compilers", run_compilers)
    return built


@needs_compiler
def test_a_kernel_is_compiled_once_and_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, twin, failing = obtain_kernels([doubling(), doubling(), branching()])
    assert isinstance(first, Kernel.__origin__) and first is twin and isinstance(failing, str)
    for rows in (3, 50):  # any number of rows
        changed = torch.ones(rows, 8)
        (found,) = first([changed, torch.arange(8.0)])
        assert torch.equal(changed, torch.arange(1.0, 9.0).expand(rows, 8)) and torch.equal(found, changed * 2)
    assert {path.suffix for path in folder.iterdir()} == {".pt2", ".failed", ".key", ""}  # and the lock
    forget(monkeypatch)
    monkeypatch.delattr(decode.cpu.kernel_cache, "_compile")
    (kept,) = obtain_kernels([doubling()])
    assert not isinstance(kept, str) and torch.equal(kept([torch.ones(1, 8), torch.zeros(8)])[0], torch.full((1, 8), 2))


def test_what_determines_a_kernel_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graph, constants, inputs, sizes, options, torch and CPU; but not a source's description."""

    def name(factor: Any = 2, size: int = 8, dynamic: tuple[int, ...] = (0,), dtype: Any = torch.float32) -> str:
        examples = [torch.empty(3, size, dtype=dtype)]
        return name_kernel(KernelSource("scaling", lambda inputs: [inputs[0] * factor], examples, [dynamic]).export())

    names = [name(), name(3), name(torch.full((8,), 2.0)), name(torch.full((8,), 3.0)), name(torch.tensor(2.0))]
    names += [name(size=9), name(dynamic=()), name(dynamic=(0, 1)), name(dtype=torch.float64)]
    for option in decode.cpu.kernel_source.OPTIONS:
        with monkeypatch.context() as patch:
            patch.setitem(decode.cpu.kernel_source.OPTIONS, option, "another")
            names.append(name())
    for environment in (("2.0", "a CPU"), ("3.0", "a CPU"), ("3.0", "another CPU")):
        monkeypatch.setattr(decode.cpu.kernel_source, "environment", lambda environment=environment: environment)
        names.append(name())
    assert len({*names}) == len(names)
    assert name_kernel(doubling().export()) == name_kernel(doubling("other").export())


def test_what_may_change_a_graph_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(description: str = "same", size: int = 8, dynamic: tuple[int, ...] = ()) -> str:
        return KernelSource(description, lambda inputs: inputs, [torch.empty(3, size)], [dynamic]).key

    keys = [key(), key("other"), key(size=9), key(dynamic=(0,))]
    torch.set_default_dtype(torch.float64)
    try:
        keys.append(key())
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(decode.cpu.kernel_source, "environment", lambda: ("3.0", "another CPU"))
    keys.append(key())
    monkeypatch.setattr(decode.cpu.kernel_source.transformers, "__version__", "99")
    keys.append(key())
    assert len({*keys}) == len(keys) and key() == key()


def test_an_edited_comment_does_not_recompile_and_an_edited_computation_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, keys = build_at_once(monkeypatch, None), []
    monkeypatch.syspath_prepend(tmp_path)

    def obtain(code: str) -> None:
        """Obtain the kernel of a layer whose source file was just edited."""
        (tmp_path / "edited_layer.py").write_text(code)
        sys.modules.pop("edited_layer", None)
        decode.cpu.kernel_source._digest_source.cache_clear()
        layer = importlib.import_module("edited_layer").Layer()
        source = KernelSource(describe_module(layer), lambda inputs: [layer(*inputs)], [torch.empty(3)], [()])
        keys.append(source.key)
        obtain_kernels([source])

    code = "from torch import nn\n\nclass Layer(nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for text, count in ((code, 1), (code, 1), (f"# A comment.\n{code}", 1), (code.replace("2", "3"), 2)):
        obtain(text)
        assert len(built) == count
    assert len({*keys}) == 3


def test_an_edited_comment_in_this_package_does_not_recompile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, keys = build_at_once(monkeypatch, None), []
    monkeypatch.setattr(decode.cpu.kernel_source, "PACKAGE", tmp_path)
    for file in ("one.py", "one.py", "new/module.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(f"# Comment {len(keys)}.")
        decode.cpu.kernel_source._digest_package.cache_clear()
        keys.append(doubling().key)
        obtain_kernels([doubling()])
    decode.cpu.kernel_source._digest_package.cache_clear()
    assert len({*keys}) == 3 and len(built) == 1


def test_a_failure_is_reported_and_retried_only_on_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_at_once(monkeypatch, None)
    for retry, count in ((False, 1), (False, 1), (True, 2)):
        assert obtain_kernels([doubling()], retry_failed=retry) == ["CompileError: no headers"]
        assert len(built) == count
    assert not (folder / "making").exists()


def test_a_damaged_kernel_is_compiled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    path = folder / f"{name_kernel(doubling().export())}.pt2"
    path.write_bytes(b"damaged")
    (folder / f"{doubling().key}.key").write_text(path.stem)
    built = build_at_once(monkeypatch, b"damaged, too")
    assert obtain_kernels([doubling()]) == ["the compiled kernel cannot be loaded"]
    assert len(built) == 1 and not path.exists()


def test_a_compiler_that_is_killed_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killed = tmp_path / "killed.py"
    killed.write_text("import sys; print(sys.argv[1], flush=True); sys.exit(137)")
    monkeypatch.setattr(decode.cpu.kernel_cache, "COMPILE_SCRIPT", killed)
    assert [*decode.cpu.kernel_cache._run_compilers([["a", "b"], []])] == ["a", "b"]


def test_an_interrupt_stops_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import sys, time; print(sys.argv[1], flush=True); time.sleep(60)")
    monkeypatch.setattr(decode.cpu.kernel_cache, "COMPILE_SCRIPT", slow)
    compiling = decode.cpu.kernel_cache._run_compilers([["a", "b"]])
    assert next(compiling) == "a"
    begun = time.perf_counter()
    compiling.close()
    assert time.perf_counter() - begun < 30


def test_a_folder_that_cannot_be_written_is_an_error(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(OSError, match="kernels"):
        obtain_kernels([doubling()])


def test_importing_the_library_does_not_import_the_compiler() -> None:
    code = "import decode, sys; sys.exit('torch._inductor.compile_fx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": "."}).returncode == 0
