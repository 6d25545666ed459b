"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def write_aside(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Let `write(file)` fill a file beside this one, which it then replaces. Only one process may do so at a time.

    A kill or a full disk leaves the old file whole. Raises OSError, with the path, where it cannot be written.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # torch.save hides what befell the file
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error
    finally:
        aside.unlink(missing_ok=True)
