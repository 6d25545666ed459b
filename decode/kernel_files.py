"""Kernels that are compiled once and kept in the user's cache, a file for each; see `build_kernels.py`."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from subprocess import DEVNULL, PIPE
from typing import Any

import torch
import transformers
from filelock import FileLock
from torch import Tensor, nn
from tqdm import tqdm

from decode import build_kernels
from decode.user_cache import remove, scratch, user_cache

MAKERS = "build_kernels.py", "compiled.py", "kernels.py", "layer_calls.py", "prepare.py"
WORKERS = 8  # compilers at once, at most: each needs half a gigabyte

Kernel = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Recipe:
    """What a kernel is made of.

    `identity` tells it from all others, by its repr; `compute` is called with the inputs, tensors like `examples`, of
    which it may change some in place, and returns a tensor. `free`: an input's dimensions whose size may be another.
    """

    identity: tuple[Any, ...]
    compute: Callable[[list[Tensor]], Tensor]
    examples: list[Tensor]
    free: list[tuple[int, ...]]

    @property
    def path(self) -> Path:
        """Where its kernel is kept."""
        likes = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in self.examples]
        parts = (_surroundings(), self.identity, likes, self.free)
        return user_cache() / "kernels" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.pt2"


def obtain_kernels(recipes: Sequence[Recipe], *, again: bool = False) -> list[Kernel | str]:
    """The kernel of each recipe, compiled where it is not in the cache; or in one line why it cannot be.

    again: try what failed before, too. Raises OSError where the cache cannot be written.
    """
    missing = _missing(recipes, again)
    if missing:
        folder = user_cache() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"), scratch(folder / "making") as aside:
            _make(_missing(recipes, again), aside)  # another process may have made some meanwhile
    return [_obtain(recipe) for recipe in recipes]


def _missing(recipes: Sequence[Recipe], again: bool) -> dict[Path, Recipe]:
    made = {recipe.path: recipe for recipe in recipes}
    return {
        path: recipe for path, recipe in made.items() if not path.exists() and (again or not _failure(path).exists())
    }


def _make(recipes: Mapping[Path, Recipe], aside: Path) -> None:
    """Compile several at once, and keep each as soon as it is there."""
    with tqdm(total=len(recipes), desc="compiling kernels, once", unit="kernel", disable=not recipes) as progress:
        exported: dict[str, Path] = {}
        for path, recipe in recipes.items():
            try:
                exported[str(_export(recipe, aside / path.stem))] = path
            except Exception as error:  # whatever torch.export makes of a model's code
                _failure(path).write_text(_first_line(error))
                progress.update()
        folders = [*exported]
        workers = min(WORKERS, os.cpu_count() or 1)
        for folder in _build([folders[place::workers] for place in range(workers)]):
            _keep(Path(folder), exported[folder])
            progress.update()


def _keep(built: Path, path: Path) -> None:
    """Put a kernel, or why there is none, to where it is looked for."""
    if (built / "kernel.pt2").exists():
        (built / "kernel.pt2").rename(path)
        remove(_failure(path))
    else:
        failure = built / "failure.txt"
        _failure(path).write_text(failure.read_text() if failure.exists() else "the compiling process was killed")


def _export(recipe: Recipe, folder: Path) -> Path:
    """What a process that compiles is given."""
    free = [dict.fromkeys(sizes, torch.export.Dim.DYNAMIC) for sizes in recipe.free]
    examples = [torch.empty_strided(like.shape, like.stride(), dtype=like.dtype) for like in recipe.examples]
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        program = torch.export.export(_Program(recipe.compute), (examples,), dynamic_shapes=(free,), strict=False)
    program.example_inputs = None
    folder.mkdir()
    torch.export.save(program, folder / "program.pt2")
    likes = [(list(like.shape), like.stride(), str(like.dtype).removeprefix("torch.")) for like in examples]
    (folder / "inputs.json").write_text(json.dumps(likes))
    return folder


class _Program(nn.Module):
    """torch.export takes modules only."""

    def __init__(self, compute: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return self._compute(inputs)


def _build(shares: Sequence[Sequence[str]]) -> Iterator[str]:
    """Compile the programs in these folders, a process for each share; yields each folder when it is done."""
    done: SimpleQueue[str] = SimpleQueue()

    def work(folders: Sequence[str]) -> None:
        command = [sys.executable, "-P", build_kernels.__file__, *folders]  # -P: our files hide no others
        left = set(folders)
        with subprocess.Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, text=True) as process:
            for line in process.stdout or ():
                left.discard(line.rstrip())
                done.put(line.rstrip())
        for folder in left:
            done.put(folder)

    with ThreadPoolExecutor(max(1, len(shares))) as pool:
        for folders in shares:
            if folders:
                pool.submit(work, folders)
        for _ in range(sum(map(len, shares))):
            yield done.get()


def _obtain(recipe: Recipe) -> Kernel | str:
    path = recipe.path
    try:
        return _load(path)
    except FileNotFoundError:
        return _failure(path).read_text()
    except RuntimeError as error:  # damaged, or of another C++ library: made anew the next time
        remove(path)
        return _first_line(error)


@cache
def _load(path: Path) -> Kernel:
    if not path.exists():
        raise FileNotFoundError(path)
    # torch._inductor.aoti_load_package would run the compiler first, to compare machines; a kernel's name does that.
    kernel: Kernel = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1).run
    return kernel


def _failure(path: Path) -> Path:
    """The file that says why a kernel cannot be made."""
    return path.with_suffix(".failed")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _surroundings() -> tuple[Any, ...]:
    """What a kernel depends on beside its recipe."""
    return torch.__version__, transformers.__version__, torch.get_default_dtype(), _machine(), _own_code()


@cache
def _machine() -> str:
    """The processor: kernels use all of its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


@cache
def _own_code() -> str:
    """A digest of the code that kernels are made by, and of."""
    files = [Path(__file__).with_name(name) for name in MAKERS]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
