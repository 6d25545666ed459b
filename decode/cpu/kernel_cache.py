"""Kernels that are compiled once and kept in the user's cache, a file for each; see `build_kernels.py`."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from queue import SimpleQueue
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import torch
import transformers
from filelock import FileLock
from torch import Tensor, nn
from tqdm import tqdm

from decode.models.user_cache import remove, say, scratch, user_cache

BUILDER = Path(__file__).with_name("compile_kernels.py")
MADE_OF = "linear_kernels.py", "layer_calls.py", "acceleration.py", "compiled_layer.py"
WORKERS = min(8, os.cpu_count() or 1)  # compilers at once: each needs half a gigabyte

Kernel = Callable[[list[Tensor]], list[Tensor]]
_LOADED: dict[Path, Kernel] = {}


@dataclass(frozen=True)
class Recipe:
    """What a kernel is made of.

    `identity` tells it from all others, by its repr; `compute` is called with the inputs, tensors like `examples`, of
    which it may change some in place, and returns tensors. `free`: an input's dimensions whose size may be another.
    """

    identity: tuple[Any, ...]
    compute: Callable[[list[Tensor]], list[Tensor]]
    examples: list[Tensor]
    free: list[tuple[int, ...]]

    @cached_property
    def path(self) -> Path:
        """Where its kernel is kept."""
        likes = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in self.examples]
        parts = (_surroundings(), self.identity, likes, self.free)
        return kernel_folder() / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.pt2"


def obtain_kernels(recipes: Sequence[Recipe], *, again: bool = False) -> list[Kernel | str]:
    """The kernel of each recipe, compiled where it is not in the cache; or in one line why it cannot be.

    again: try what failed before, too. Raises OSError where the cache cannot be written.
    """
    if _missing(recipes, again):
        folder = kernel_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"), scratch(folder / "making") as aside:
            _make(_missing(recipes, again), aside)  # another process may have made some meanwhile
    return [_load(recipe.path) or _why_not(recipe.path) for recipe in recipes]


def kernel_folder() -> Path:
    """Where kernels are kept."""
    return user_cache() / "kernels"


def _missing(recipes: Sequence[Recipe], again: bool) -> dict[Path, Recipe]:
    """What has to be compiled; what is damaged goes."""
    made = {recipe.path: recipe for recipe in recipes}
    return {
        path: recipe for path, recipe in made.items() if _load(path) is None and (again or not _failure(path).exists())
    }


def _make(recipes: Mapping[Path, Recipe], aside: Path) -> None:
    """Compile several at once, and keep each as soon as it is there."""
    exported: dict[str, Path] = {}
    if recipes:
        say(f"compiling {len(recipes)} kernels for models of this kind, once; it takes about a minute")
    with tqdm(total=len(recipes), unit="kernel", disable=None) as progress:
        for path, recipe in recipes.items():
            try:
                exported[str(_export(recipe, aside / path.stem))] = path
            except Exception as error:  # whatever torch.export makes of a model's code
                _failure(path).write_text(_first_line(error))
                progress.update()
        folders = [*exported]
        for folder in _build([folders[place::WORKERS] for place in range(WORKERS)]):
            _keep(Path(folder), exported[folder])
            progress.update()


def _keep(built: Path, path: Path) -> None:
    """Put a kernel, or why there is none, to where it is looked for."""
    package, failure = built / "kernel.pt2", built / "failure.txt"
    if package.exists():
        package.rename(path)
        remove(_failure(path))
    if _load(path) is None:
        _failure(path).write_text(failure.read_text() if failure.exists() else "what was compiled cannot be loaded")


def _export(recipe: Recipe, folder: Path) -> Path:
    """What a process that compiles is given."""
    free = [dict.fromkeys(sizes, torch.export.Dim.DYNAMIC) for sizes in recipe.free]
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        examples = [torch.empty_strided(like.shape, like.stride(), dtype=like.dtype) for like in recipe.examples]
        program = torch.export.export(_Program(recipe.compute), (examples,), dynamic_shapes=(free,), strict=False)
    program.example_inputs = None
    folder.mkdir()
    torch.export.save(program, folder / "program.pt2")
    likes = [(list(like.shape), like.stride(), str(like.dtype).removeprefix("torch.")) for like in examples]
    (folder / "inputs.json").write_text(json.dumps(likes))
    return folder


class _Program(nn.Module):
    """torch.export takes modules only."""

    def __init__(self, compute: Callable[[list[Tensor]], list[Tensor]]) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return self._compute(inputs)


def _build(shares: Sequence[Sequence[str]]) -> Iterator[str]:
    """Compile the programs in these folders, a process for each share; yields each folder when it is done."""
    done: SimpleQueue[str] = SimpleQueue()

    def wait_for(process: Popen[str], folders: Sequence[str]) -> None:
        left = set(folders)
        with process:
            for line in process.stdout or ():
                left.discard(line.rstrip())
                done.put(line.rstrip())
        for folder in left:  # it was killed
            done.put(folder)

    command = [sys.executable, "-P", str(BUILDER)]  # -P: the files beside it hide no others
    with ThreadPoolExecutor(WORKERS) as pool, ExitStack() as stack:
        for folders in filter(None, shares):
            process = Popen([*command, *folders], stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, text=True)
            stack.callback(process.kill)  # where this is interrupted
            pool.submit(wait_for, process, folders)
        for _ in range(sum(map(len, shares))):
            yield done.get()


def _load(path: Path) -> Kernel | None:
    """The kernel that is kept there, if there is one; a file that cannot be loaded is removed."""
    if path not in _LOADED and path.exists():
        try:
            # torch._inductor.aoti_load_package runs a compiler first, to compare machines; a kernel's name does that.
            _LOADED[path] = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1).run
        except RuntimeError:  # damaged, or made with other libraries
            remove(path)
    return _LOADED.get(path)


def _why_not(path: Path) -> str:
    return _failure(path).read_text() if _failure(path).exists() else "it was removed"


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
    files = [BUILDER, *[BUILDER.with_name(name) for name in MADE_OF]]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
