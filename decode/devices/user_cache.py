"""The user's cache folder, for what is made once: the default model, compiled kernels and cost curves."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

PARTIAL = ".partial"  # ends the names of folders that are not whole yet
WORK = "work-"  # begins those of working folders, which are of one process
_numbers = count()


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/draftless` or ~/.cache/draftless. It may not exist yet."""
    parent = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(parent) if os.path.isabs(parent) else Path.home() / ".cache") / "draftless"


@contextlib.contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """An empty folder that is removed afterwards. Leftovers of killed runs are removed first.

    path: ends with `PARTIAL`. The caller holds the lock of the same name, which tells that the folder is in use.
    """
    for left in path.parent.glob(f"*{PARTIAL}"):
        if left != path:
            with contextlib.suppress(OSError, Timeout), FileLock(left.with_suffix(".lock"), timeout=0) as lock:
                remove(left)
                if left.name.startswith(WORK):  # others may wait for the locks of other names
                    remove(Path(lock.lock_file))
    remove(path)
    path.mkdir()
    try:
        yield path
    finally:
        remove(path)


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """An empty folder of this process in the user's cache, which is removed afterwards, or by a later run."""
    path = user_cache() / f"{WORK}{os.getpid()}-{next(_numbers)}{PARTIAL}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")) as lock, scratch(path):
        try:
            yield path
        finally:
            remove(Path(lock.lock_file))


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The file of that name in the folder of compiled files. If it is missing or damaged, `build` writes it first.

    The name says all that determines the content. A checksum next to it tells a damaged file, which loading would crash
    on. Files are built aside, under a lock, and moved into place.

    Raises OSError if the cache cannot be written, and whatever `build` raises.
    """
    path = build_folder() / name
    if not is_whole(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")), scratch(path.with_suffix(PARTIAL)) as aside:
            if not is_whole(path):  # another process may have built it meanwhile
                build(aside / name)
                checksum = _checksum(aside / name)
                remove(path)
                path.with_suffix(".sha256").write_text(checksum)
                (aside / name).rename(path)
    return path


def build_folder() -> Path:
    """The folder of compiled files."""
    return user_cache() / "kernels"


def is_whole(path: Path) -> bool:
    """Whether a file is there as it was built."""
    try:
        return _checksum(path).encode() == path.with_suffix(".sha256").read_bytes()
    except OSError:
        return False


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def environment() -> tuple[str, str]:
    """torch's version, and the CPU: compiled code uses all of its instructions."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else [f"model name: {platform.processor()}"]
    cpu = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return torch.__version__, "\n".join(sorted(cpu))


def digest(*parts: Any) -> str:
    """Short and the same for parts with the same repr."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def print_notice(text: str) -> None:
    """Print a line for the user to stderr."""
    print(f"draftless: {text}", file=sys.stderr, flush=True)


_TOLD: set[str] = set()  # the kinds of notices that this process has printed


def print_notice_once(kind: str, text: str) -> None:
    """Print a line for the user to stderr, unless one of this kind was printed since the start."""
    if kind not in _TOLD:
        _TOLD.add(kind)
        print_notice(text)
