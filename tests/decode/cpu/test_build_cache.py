"""What is compiled is compiled once, kept in the cache and found again. Failures leave nothing that looks whole."""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from filelock import FileLock
from torch import nn
from transformers import PreTrainedModel

from decode import Target
from decode.cpu import backend, compiled_layers, layer_kernel
from decode.cpu.compiled_layers import compile_layers
from decode.cpu.layer_kernel import describe_module, name_kernel
from decode.devices import user_cache
from decode.devices.user_cache import build_once, is_whole, working_folder
from tests.support.models import needs_compiler, tiny


def builder(content: bytes = b"a library") -> Mock:
    """Builds a file of these bytes, and counts."""
    return Mock(side_effect=lambda into: into.write_bytes(content))


def test_a_file_is_built_once(kernel_folder: Path) -> None:
    build = builder()
    path = build_once("some.so", build)
    assert build_once("some.so", build) == path == kernel_folder / "some.so" and build.call_count == 1
    assert path.read_bytes() == b"a library" and is_whole(path)
    assert {file.suffix for file in kernel_folder.iterdir()} == {".so", ".sha256", ".lock"}
    other = builder(b"another")
    assert build_once("other.so", other).read_bytes() == b"another" and path.read_bytes() == b"a library"


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "other bytes": lambda path: path.write_bytes(b"A library"),
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "no checksum": lambda path: path.with_suffix(".sha256").unlink(),
    "half a checksum": lambda path: path.with_suffix(".sha256").write_text("ab12"),
    "no text for a checksum": lambda path: path.with_suffix(".sha256").write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_rebuilt(damage: str, kernel_folder: Path) -> None:
    build = builder()
    path = build_once("some.so", build)
    DAMAGES[damage](path)
    assert not is_whole(path)
    assert build_once("some.so", build).read_bytes() == b"a library" and build.call_count == 2 and is_whole(path)


def test_leftovers_of_killed_builds_are_swept_but_not_those_of_one_that_runs(kernel_folder: Path) -> None:
    own, left, running = (kernel_folder / f"{name}.partial" for name in ("some", "old", "running"))
    for folder in (own, left, running):
        folder.mkdir(parents=True)
        (folder / "some.so").write_bytes(b"a li")
    (kernel_folder / "some.sha256").write_text("of another build")
    with FileLock(running.with_suffix(".lock")):
        assert build_once("some.so", builder()).read_bytes() == b"a library"
    assert not own.exists() and not left.exists() and running.exists()
    build_once("other.so", builder())
    assert not running.exists()


def test_a_working_folder_is_removed_also_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    left = tmp_path / "draftless" / "work-1.partial"
    left.mkdir(parents=True)
    left.with_suffix(".lock").touch()
    with working_folder() as folder, working_folder() as other:
        assert folder.is_dir() and other.is_dir() and folder != other and not left.exists()
    with pytest.raises(KeyError), working_folder():
        raise KeyError
    assert not [*folder.parent.iterdir()]


LOADING = """
import torch
from decode import Target
from tests.support.models import tiny
assert Target(tiny("llama", dtype=torch.float32, num_hidden_layers=1), accelerate="compiled").compiled
print("done", flush=True)
input()
"""


@needs_compiler
@pytest.mark.slow
def test_starts_leave_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    """One that compiles, one that is killed while it does, and those that find a kernel."""
    temporary, kernels = tmp_path / "temporary", tmp_path / "cache" / "draftless" / "kernels"
    temporary.mkdir()
    places = {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment = {**os.environ, **places}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)

    def begin() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LOADING]
        root, pipes = Path(__file__).parents[3], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=root, env=environment, **pipes)  # type: ignore[call-overload]

    with begin() as killed:
        while not [*kernels.glob("*.partial/*/*")] and killed.poll() is None:  # of the layer's kernel
            sleep(0.05)
        killed.kill()
    assert [*kernels.glob("*.partial")]
    for _ in range(2):
        with begin() as started:
            assert started.stdout is not None and started.stdout.readline() == "done\n"
            assert not [*kernels.glob("*.partial")]
            started.communicate("\n")
    left = [path.name for path in temporary.rglob("*") if not path.name.startswith("torchinductor_")]
    assert [*kernels.glob("*.so")] and not left  # importing torch's compilers makes an empty folder of that name


@pytest.mark.parametrize("error", [RuntimeError("no headers"), OSError(errno.ENOSPC, "No space left on device")])
def test_a_failed_build_leaves_nothing(kernel_folder: Path, error: Exception) -> None:
    def build(into: Path) -> None:
        into.write_bytes(b"a li")
        raise error

    with pytest.raises(type(error)):
        build_once("some.so", build)
    assert [file.suffix for file in kernel_folder.iterdir()] == [".lock"]
    assert is_whole(build_once("some.so", builder()))


def test_threads_that_need_the_same_file_build_it_once(kernel_folder: Path) -> None:
    build = builder()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(build_once, ["some.so"] * 8, [build] * 8))
    assert build.call_count == 1 and is_whole(kernel_folder / "some.so")


@pytest.fixture
def compiled(exported: list[str], monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The function that compiles a kernel, or tries to. It counts."""
    compile_kernel = Mock(wraps=compiled_layers.compile_kernel)
    monkeypatch.setattr(compiled_layers, "compile_kernel", compile_kernel)
    return compile_kernel


def start(mode: str = "compiled", **changes: Any) -> bool:
    """Load a model like another process would. Returns whether it is compiled."""
    compiled_layers._LOADED.clear()
    model: PreTrainedModel = tiny("llama", **{"dtype": torch.float32, "num_hidden_layers": 1, **changes})
    return Target(model, accelerate=mode).compiled


@needs_compiler
def test_a_kernel_is_compiled_once_and_found_again(
    compiled: Mock, kernel_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start() and compiled.call_count == 1
    assert capsys.readouterr().err.count("compiling kernels") == 1
    assert start() and start(seed=1) and compiled.call_count == 1 and not capsys.readouterr().err
    (kernel,) = kernel_folder.glob("*.so")
    kernel.write_text("damaged")
    assert start() and compiled.call_count == 2 and is_whole(kernel)


@needs_compiler
def test_a_start_tells_once_that_it_compiles_or_that_it_cannot(
    compiled: Mock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers of several kinds have a kernel each, and so has a draft model."""
    assert start() and start(hidden_size=64) and compiled.call_count == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(layer_kernel, "build_library", Mock(side_effect=RuntimeError("no headers")))
    assert not start(hidden_size=96) and not start(hidden_size=128) and compiled.call_count == 4
    told = "draftless: layers are not compiled, so decoding is slower: RuntimeError: no headers\n"
    assert capsys.readouterr().err == told


@needs_compiler
def test_a_failure_is_remembered_and_retried_on_request(
    compiled: Mock, kernel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "WORTH_COMPILING", 0)
    with monkeypatch.context() as patch:
        patch.setattr(layer_kernel, "build_library", Mock(side_effect=RuntimeError("no headers")))
        for mode, count in (("auto", 1), ("auto", 1), ("compiled", 2), ("auto", 2)):
            assert not start(mode) and compiled.call_count == count
    (failure,) = kernel_folder.glob("*.failed")
    assert failure.read_text() == "RuntimeError: no headers" and not [*kernel_folder.glob("*.so")]
    assert not start("auto") and compiled.call_count == 2
    assert start("compiled") and compiled.call_count == 3
    assert start("auto") and compiled.call_count == 3  # what the retry compiled is found


@needs_compiler
def test_a_kernel_that_cannot_be_loaded_is_a_failure(compiled: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "load_kernel", Mock(side_effect=RuntimeError("not for this machine")))
    assert not start() and not start("auto") and compiled.call_count == 1


@needs_compiler
def test_layers_stay_packed_if_their_kernels_cannot_be_kept(
    compiled: Mock, kernel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_folder.write_text("a file")
    assert not start() and not compiled.called and kernel_folder.read_text() == "a file"
    kernel_folder.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        assert not start() and not [*kernel_folder.glob("*.so")]
    assert start() and all(map(is_whole, kernel_folder.glob("*.so")))


def test_what_determines_a_kernel_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs, dimensions, options, the default dtype, versions and the CPU; not the weights or the layer's number."""
    layer = tiny("llama", dtype=torch.float32).model.layers[0]

    def name(form: Any = "form", dimensions: Any = (("B", "N", 32),), other: nn.Module = layer) -> str:
        return name_kernel(other, (form,), dimensions)

    assert name() == name(other=tiny("llama", dtype=torch.float32, seed=1).model.layers[1])
    names = [name(), name("another"), name(dimensions=(("B", "N", 33),)), name(dimensions=((1, "N", 32),))]
    settings = {"attention_bias": True}, {"attn_implementation": "eager"}, {"hidden_act": "relu"}, {"head_dim": 4}
    for setting in settings:
        names.append(name(other=tiny("llama", **{"dtype": torch.float32, **setting}).model.layers[0]))
    names.append(name(other=tiny("llama", dtype=torch.float32).model.layers[0].train()))  # dropout
    changes: list[tuple[Any, str, Any]] = [(layer_kernel.OPTIONS, option, "another") for option in layer_kernel.OPTIONS]
    changes += [
        (vars(torch), "get_default_dtype", lambda: torch.float64),
        (vars(layer_kernel.transformers), "__version__", "99"),
    ]
    for environment in (("2.0", "a CPU"), ("3.0", "a CPU"), ("3.0", "another CPU")):
        changes.append((vars(layer_kernel), "environment", lambda environment=environment: environment))
    for holder, key, value in changes:
        with monkeypatch.context() as patch:
            patch.setitem(holder, key, value)
            names.append(name())
    assert len({*names}) == len(names)


def test_an_edited_comment_does_not_recompile_and_an_edited_computation_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def describe(code: str) -> str:
        """What describes a layer whose source file was just edited."""
        (tmp_path / "edited_layer.py").write_text(code)
        sys.modules.pop("edited_layer", None)
        layer_kernel._digest_code.cache_clear()
        return user_cache.digest(describe_module(importlib.import_module("edited_layer").Layer()))

    code = "from torch import nn\n\nclass Layer(nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    assert describe(code) == describe(code) == describe(f"# A comment.\n\n{code}")
    assert describe(code) != describe(code.replace("2", "3"))


def test_layers_of_a_kind_share_a_name_after_they_ran() -> None:
    """Merged layers keep their last input; some models call the parts in another order."""
    model = Target(tiny("llama", dtype=torch.float32), accelerate="packed").model
    layer, ids = model.model.layers[0], torch.tensor([[3, 4]])
    described = describe_module(layer)
    model(ids)
    layer.self_attn.q_proj(torch.ones(1, 1, 32))
    assert describe_module(layer) == described == describe_module(model.model.layers[1])


def test_models_that_cannot_run_the_trials_are_left_alone(compiled: Mock) -> None:
    target = Target(tiny("llama", dtype=torch.float32, vocab_size=8), accelerate="packed")
    compile_layers(target)  # the trials use tokens up to 17
    assert not compiled.called and not compiled_layers.compiled_layers(target.model)


def test_the_sources_of_the_ops_are_part_of_the_package() -> None:
    folder = Path(backend.__file__).parent
    project = tomllib.loads((folder.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["decode.cpu"]
    sources = {file for file in folder.iterdir() if file.is_file() and file.suffix != ".py"}
    assert sources == {file for pattern in patterns for file in folder.glob(pattern)}
