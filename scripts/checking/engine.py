"""Runs vLLM in a Python of its own, because it needs other versions than Draftless, and says why it failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("vllm_program.py")
FIND = "from importlib.util import find_spec; raise SystemExit(find_spec('vllm') is None)"
TIMEOUT = 1800  # seconds for loading and a few prompts; a small model on two cores takes one or two minutes
ISOLATED = {"PYTHONSAFEPATH": "1"}  # folders of a script and of the user hide no module of vLLM's
SHOWN = 500  # characters of a reason


class EngineFailure(Exception):
    """vLLM gave no answers. The message is the reason, in one line."""


@dataclass(frozen=True)
class Answers:
    """A program's answers, and what it accepted."""

    tokens: list[list[int]]  # of each answer, stop token included
    drafts: int
    accepted: list[int]  # [i]: drafts whose token i was accepted
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def tokens_per_draft(self) -> float:
        """The bonus token included; the prefill, which has no draft, is not counted."""
        return 1 + sum(self.accepted) / max(self.drafts, 1)


def check_engine(python: str) -> None:
    """Raise ValueError if this Python cannot import vLLM."""
    try:
        run = subprocess.run([python, "-c", FIND], capture_output=True, env=os.environ | ISOLATED)
    except OSError as error:
        raise ValueError(f"--engine-python {python} does not run: {error.strerror}") from error
    if run.returncode:
        raise ValueError(f"--serve needs vLLM, and {python} has none; name a Python with vLLM by --engine-python")


def ask_engine(python: str, request: Mapping[str, Any]) -> Answers:
    """The answers of vLLM to a request. Raises EngineFailure if there are none."""
    settings: dict[str, Any] = {"text": True, "env": os.environ | ISOLATED, "start_new_session": True}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        with subprocess.Popen([python, str(PROGRAM)], **streams, **settings) as process:
            try:
                out, _ = process.communicate(json.dumps(request), TIMEOUT)
            except subprocess.TimeoutExpired:
                raise EngineFailure(f"it did not answer within {TIMEOUT / 60:g} minutes") from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with all processes that vLLM started
        if process.returncode == -signal.SIGKILL:
            raise EngineFailure("it was killed, most likely because memory ran out")
        try:
            result: dict[str, Any] = json.loads(out)
        except ValueError:
            log.seek(0)
            last = (log.read().strip().splitlines() or ["it printed nothing"])[-1]
            raise EngineFailure(f"it ended with status {process.returncode}: {last[:SHOWN]}") from None
    if "error" in result:
        raise EngineFailure(result["error"][:SHOWN])
    return Answers(**result)
