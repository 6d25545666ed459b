"""Compiled kernels, kept in the user's cache.

`GRAPH.pt2` is named after what determines a kernel: the exported graph, torch's version and the CPU (`name_kernel`).
Exporting takes about a second a kernel, too long for every start. So `KEY.key` holds the name of the graph that a
source with that key exports to. Keys need no export: they cover all source files that could change the graph. An edited
comment changes the key; the source is exported again, and its unchanged graph finds the kernel that it had.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import DEVNULL, Popen

import torch
from filelock import FileLock
from torch import Tensor
from tqdm import tqdm

from decode.cpu.compile_kernels import describe_error
from decode.cpu.kernel_source import KernelSource, name_kernel
from decode.models.user_cache import print_notice, remove, scratch, user_cache

COMPILE_SCRIPT = Path(__file__).with_name("compile_kernels.py")
WORKERS = min(8, os.cpu_count() or 1)  # compilers at once: each needs half a gigabyte

Kernel = Callable[[list[Tensor]], list[Tensor]]
_LOADED: dict[Path, Kernel] = {}


def obtain_kernels(sources: Sequence[KernelSource], *, retry_failed: bool = False) -> list[Kernel | str]:
    """The kernel of each source, compiled if it is not in the cache, or one line that says why there is none.

    retry_failed: compile again what failed before. Raises OSError if the cache cannot be written.
    """
    if any(_is_missing(_find_path(source), retry_failed) for source in sources):
        folder = kernel_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"), scratch(folder / "making") as making:
            _compile({source.key: source for source in sources}, making, retry_failed)
    return [_load(path) or _failure_file(path).read_text() for path in map(_find_path, sources)]


def kernel_folder() -> Path:
    """The folder of the kernels."""
    return user_cache() / "kernels"


def _find_path(source: KernelSource) -> Path:
    """Where a source's kernel is kept. A source that was never exported, or cannot be, goes by its key."""
    key_file = _key_file(source)
    name = key_file.read_text() if key_file.exists() else source.key
    return kernel_folder() / f"{name}.pt2"


def _key_file(source: KernelSource) -> Path:
    return kernel_folder() / f"{source.key}.key"


def _failure_file(path: Path) -> Path:
    """The file that says why there is no kernel."""
    return path.with_suffix(".failed")


def _is_missing(path: Path, retry_failed: bool) -> bool:
    """Whether there is no kernel and no reason to leave it at that."""
    return _load(path) is None and (retry_failed or not _failure_file(path).exists())


def _compile(sources: dict[str, KernelSource], making: Path, retry_failed: bool) -> None:
    """Export the sources without a kernel and compile new graphs. Each kernel is kept as soon as it is done."""
    paths: dict[str, Path] = {}  # the kernel's place in the cache, by the folder of its program
    for source in sources.values():
        if not _is_missing(_find_path(source), retry_failed):
            continue  # another process has compiled it meanwhile
        try:
            program = source.export()
        except Exception as error:  # anything from torch.export or the model's code
            _failure_file(_find_path(source)).write_text(describe_error(error))
            continue
        _key_file(source).write_text(name_kernel(program))
        path = _find_path(source)
        folder = making / path.stem
        if not folder.exists() and _is_missing(path, retry_failed):
            if not paths:
                print_notice("compiling kernels for models of this kind, once; it takes about a minute")
            folder.mkdir()
            torch.export.save(program, folder / "program.pt2")
            paths[str(folder)] = path
    shares = [[*paths][place::WORKERS] for place in range(WORKERS)]
    for done in tqdm(_run_compilers(shares), total=len(paths), unit="kernel", disable=None if paths else True):
        _keep(Path(done), paths[done])


def _keep(folder: Path, path: Path) -> None:
    """Move a kernel, or the reason why there is none, to its place in the cache."""
    package, failure = folder / "kernel.pt2", folder / "failure.txt"
    if package.exists():
        package.rename(path)
        remove(_failure_file(path))
    if _load(path) is None:
        reason = failure.read_text() if failure.exists() else "the compiled kernel cannot be loaded"
        _failure_file(path).write_text(reason)


def _run_compilers(shares: Sequence[Sequence[str]]) -> Iterator[str]:
    """Compile the programs in these folders, one process a share. Yields each folder when it is done."""
    left = {folder: None for share in shares for folder in share}
    reader, writer = os.pipe()  # all processes write to it
    with open(reader) as lines, ExitStack() as stack:
        with open(writer, "w") as output:
            for folders in filter(None, shares):
                command = [sys.executable, "-P", str(COMPILE_SCRIPT), *folders]  # -P: import no modules next to it
                process = stack.enter_context(Popen(command, stdin=DEVNULL, stdout=output, stderr=DEVNULL))
                stack.callback(process.kill)  # if this is interrupted
        for line in lines:
            left.pop(line.rstrip())
            yield line.rstrip()
    yield from left  # their process was killed


def _load(path: Path) -> Kernel | None:
    """The kernel in a file, if there is one. Removes a file that cannot be loaded."""
    if path not in _LOADED and path.exists():
        try:
            # torch._inductor.aoti_load_package first runs a compiler to compare machines. The kernel's name does that.
            _LOADED[path] = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1).run
        except RuntimeError:  # damaged, or compiled with other libraries
            remove(path)
    return _LOADED.get(path)
