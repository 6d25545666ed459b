"""What is compiled once per machine and kept in the user's cache: the ops in C++ and the decoder layers.

A file's name says all that determines its content. A checksum next to it tells a damaged file, which loading would
crash on. Files are built aside, under a lock, and moved into place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from decode.devices.user_cache import PARTIAL, remove, scratch, user_cache


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The file of that name in the cache. If it is missing or damaged, `build` writes it first.

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
                _checksum_file(path).write_text(checksum)
                (aside / name).rename(path)
    return path


def build_folder() -> Path:
    """The folder of compiled files."""
    return user_cache() / "kernels"


def is_whole(path: Path) -> bool:
    """Whether a file is there as it was built."""
    try:
        return _checksum(path).encode() == _checksum_file(path).read_bytes()
    except OSError:
        return False


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".sha256")
