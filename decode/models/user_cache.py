"""The folder in the user's cache where things are kept that are made once: the default model, compiled kernels."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/draftless`, or ~/.cache/draftless; it may not be there yet."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "draftless"


@contextlib.contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """A new empty folder, gone afterwards whatever happens; what a killed run left there is removed first."""
    remove(path)
    path.mkdir()
    try:
        yield path
    finally:
        remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def say(text: str) -> None:
    """Tell whoever waits."""
    print(f"draftless: {text}", file=sys.stderr, flush=True)
