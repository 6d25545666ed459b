"""Atomic file writes: a file is replaced as a whole or stays as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

ASIDE = ".saving-"  # begins the names of folders whose files are still being written


def write_aside(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Call `write(file)` on a temporary file in the same folder, then replace `path` with it.

    A kill or a full disk leaves the old file intact. Only one process may write a path at a time.
    Raises OSError, naming `path`, if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # torch.save wraps an OSError
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def replace_files(folder: Path, write: Callable[[Path], Any], last: str) -> None:
    """Call `write(aside)` on an empty folder, then move all files in it to `folder`, one by one, and `last` at the end.

    A kill or a full disk leaves whole files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{ASIDE}*"):  # of a run that was killed
        shutil.rmtree(left)
    with TemporaryDirectory(dir=folder, prefix=ASIDE) as aside:
        write(Path(aside))
        files = [file.relative_to(aside) for file in Path(aside).rglob("*") if file.is_file()]
        for file in sorted(files, key=lambda file: file.name == last):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(aside) / file, folder / file)


def create_folder(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write(aside)` on an empty folder next to `path`, then rename it to `path`, which is missing or empty.

    A kill or a full disk leaves no part of it at `path`. Only one process may write a path at a time.
    """
    path = path.resolve()
    aside = path.with_name(f"{ASIDE}{path.name}")
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed
    aside.mkdir(parents=True)
    try:
        write(aside)
        os.replace(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
