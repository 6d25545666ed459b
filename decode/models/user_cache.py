"""The user's cache folder, for what is made once: the default model, compiled kernels and cost curves."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/draftless` or ~/.cache/draftless. It may not exist yet."""
    parent = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(parent) if os.path.isabs(parent) else Path.home() / ".cache") / "draftless"


@contextlib.contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """An empty folder that is removed afterwards. Leftovers of a killed run are removed first."""
    remove(path)
    path.mkdir()
    try:
        yield path
    finally:
        remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def print_notice(text: str) -> None:
    """Print a line for the user to stderr."""
    print(f"draftless: {text}", file=sys.stderr, flush=True)
