"""What commands print: in a test's process, see the fixture `run_main`, or in their own."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Run(NamedTuple):
    status: Any
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The JSON objects of a command that prints one a line."""
        return [json.loads(line) for line in self.out.splitlines()]

    def refused(self, *messages: str) -> None:
        """It ended in one clear line on stderr, with nothing on stdout."""
        assert (self.status, self.out, self.err.count("\n")) == (2, "", 1), self
        assert re.match(r"[\w. ]+: error: ", self.err) and all(message in self.err for message in messages), self.err


Call = Callable[..., Run]


class Screen(io.StringIO):
    """A file that is a terminal."""

    def isatty(self) -> bool:
        return True


def write_rows(file: str | Path, rows: Sequence[Any]) -> str:
    """Write a JSON object a line. Returns the file's name."""
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def run_module(module: str, *options: str) -> Any:
    """The JSON that a module prints last, which runs in a process of its own."""
    command, root = [sys.executable, "-m", module, *options], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done
    return json.loads(done.stdout.splitlines()[-1])
