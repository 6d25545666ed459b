"""Runs vLLM in a Python of its own, because it needs other versions than Draftless, and says why it failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

PROGRAM = Path(__file__).with_name("vllm_program.py")
FIND = "from importlib.util import find_spec as find; print([name for name in ('vllm', 'sglang') if find(name)])"
TIMEOUT = 1800  # seconds for loading and a few prompts; a small model on two cores takes one or two minutes
SHOWN = 500  # characters of a reason


class EngineFailure(Exception):
    """vLLM gave no answers. The message is the reason, in one line."""


@dataclass(frozen=True)
class Request:
    """What vLLM is asked for. Without a head, `head` and `method` are None."""

    model: str
    dtype: str
    prompts: list[list[int]]
    stop_ids: list[int]
    max_new_tokens: int
    draft_tokens: int
    head: str | None = None
    method: str | None = None


@dataclass(frozen=True)
class Answers:
    """What vLLM answered."""

    tokens: list[list[int]]  # of each answer, stop token included
    drafts: int
    accepted: list[int]  # [i]: drafts whose token i was accepted
    versions: dict[str, str]
    seconds: float  # loading included
    gigabytes: float  # of main memory, at most


def check_engine(python: str) -> None:
    """Raise ValueError if this Python cannot import vLLM."""
    try:
        run = subprocess.run([python, "-c", FIND], capture_output=True, text=True, env=_environment())
    except OSError as error:
        raise ValueError(f"--engine-python {python} does not run: {error.strerror}") from error
    if "vllm" not in run.stdout:
        other = "it has SGLang, with which --serve does not serve; " if "sglang" in run.stdout else ""
        raise ValueError(
            f"--serve needs vLLM, and {python} has none; {other}name a Python with vLLM by --engine-python"
        )


def ask_engine(python: str, request: Request) -> Answers:
    """The answers of vLLM to a request. Raises EngineFailure if there are none."""
    with tempfile.TemporaryFile("w+", errors="replace") as log, _start(python, log) as process:
        try:
            out, _ = process.communicate(json.dumps(asdict(request)), TIMEOUT)
        except subprocess.TimeoutExpired:
            raise EngineFailure(f"it did not answer within {TIMEOUT / 60:g} minutes") from None
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


@contextmanager
def _start(python: str, log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """The program, in a process group that ends with this block, with all processes that vLLM started."""
    pipe = subprocess.PIPE
    settings: dict[str, Any] = {"text": True, "env": _environment(), "start_new_session": True}
    with subprocess.Popen([python, str(PROGRAM)], stdin=pipe, stdout=pipe, stderr=log, **settings) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """This environment, where the folders of a script and of the user hide no module of vLLM's."""
    return {**os.environ, "PYTHONSAFEPATH": "1"}
