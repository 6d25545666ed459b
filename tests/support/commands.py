"""What a command that ran in a test's process printed, see the fixture `run_main`."""

from __future__ import annotations

import json
import re
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
