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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from subprocess import DEVNULL, PIPE, Popen

import torch
from filelock import FileLock
from torch import Tensor
from tqdm import tqdm

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
    if _find_missing(sources, retry_failed):
        folder = kernel_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"), scratch(folder / "making") as making:
            # Looked up again: another process may have compiled some meanwhile.
            _compile(_find_missing(sources, retry_failed), making, retry_failed)
    return [_load(path) or _read_failure(path) for path in map(_find_path, sources)]


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


def _find_missing(sources: Sequence[KernelSource], retry_failed: bool) -> list[KernelSource]:
    """The sources without a kernel, each key once. Removes damaged kernels."""
    by_key = {source.key: source for source in sources}
    return [source for source in by_key.values() if _is_missing(_find_path(source), retry_failed)]


def _is_missing(path: Path, retry_failed: bool) -> bool:
    """Whether there is no kernel and no reason to leave it at that."""
    return _load(path) is None and (retry_failed or not _failure_file(path).exists())


def _compile(sources: Sequence[KernelSource], making: Path, retry_failed: bool) -> None:
    """Export the sources and compile new graphs, several at once. Each kernel is kept as soon as it is done."""
    paths: dict[str, Path] = {}  # the kernel's place in the cache, by the folder of its program
    with tqdm(total=len(sources), unit="kernel", disable=None) as progress:
        for source in sources:
            folder = _export(source, making, retry_failed)
            if folder is None:
                progress.update()
                continue
            if not paths:
                print_notice("compiling kernels for models of this kind, once; it takes about a minute")
            paths[str(folder)] = _find_path(source)
        folders = [*paths]
        for done in _run_compilers([folders[place::WORKERS] for place in range(WORKERS)]):
            _keep(Path(done), paths[done])
            progress.update()


def _export(source: KernelSource, making: Path, retry_failed: bool) -> Path | None:
    """The folder of a program to compile; None if the export fails or the graph needs no new kernel."""
    try:
        program = source.export()
    except Exception as error:  # anything from torch.export or the model's code
        line = (str(error).strip().splitlines() or [""])[0]
        _failure_file(_find_path(source)).write_text(f"{type(error).__name__}: {line}")
        return None
    _key_file(source).write_text(name_kernel(program))
    path = _find_path(source)
    folder = making / path.stem
    if folder.exists() or not _is_missing(path, retry_failed):
        return None
    source.save(program, folder)
    return folder


def _keep(folder: Path, path: Path) -> None:
    """Move a kernel, or the reason why there is none, to its place in the cache."""
    package, failure = folder / "kernel.pt2", folder / "failure.txt"
    if package.exists():
        package.rename(path)
        remove(_failure_file(path))
    if _load(path) is None:
        _failure_file(path).write_text(
            failure.read_text() if failure.exists() else "the compiled kernel cannot be loaded"
        )


def _run_compilers(shares: Sequence[Sequence[str]]) -> Iterator[str]:
    """Compile the programs in these folders, one process a share. Yields each folder when it is done."""
    done: SimpleQueue[str] = SimpleQueue()

    def watch(process: Popen[str], folders: Sequence[str]) -> None:
        left = set(folders)
        with process:
            for line in process.stdout or ():
                left.discard(line.rstrip())
                done.put(line.rstrip())
        for folder in left:  # the process was killed
            done.put(folder)

    command = [sys.executable, "-P", str(COMPILE_SCRIPT)]  # -P: modules next to the script hide no others
    with ThreadPoolExecutor(WORKERS) as pool, ExitStack() as stack:
        for folders in filter(None, shares):
            process = Popen([*command, *folders], stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, text=True)
            stack.callback(process.kill)  # if this is interrupted
            pool.submit(watch, process, folders)
        for _ in range(sum(map(len, shares))):
            yield done.get()


def _load(path: Path) -> Kernel | None:
    """The kernel in a file, if there is one. Removes a file that cannot be loaded."""
    if path not in _LOADED and path.exists():
        try:
            # torch._inductor.aoti_load_package first runs a compiler to compare machines. The kernel's name does that.
            _LOADED[path] = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1).run
        except RuntimeError:  # damaged, or compiled with other libraries
            remove(path)
    return _LOADED.get(path)


def _read_failure(path: Path) -> str:
    return _failure_file(path).read_text() if _failure_file(path).exists() else "it was removed"


def _failure_file(path: Path) -> Path:
    """The file that says why there is no kernel."""
    return path.with_suffix(".failed")
