"""A server in a process of its own, and what it is asked."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from decode import Answer, Target, generate

KEY = "sesame"
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
EXACT = ("--dtype", "float64", "--accelerate", "off", "--proposer", "ngram")
ASKED: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}


class Place:
    """A server in a process of its own."""

    def __init__(self, folder: Path, *options: str, common: Sequence[str] = EXACT) -> None:
        command = [sys.executable, "-m", "draftless_commands.serve", "--model", folder, "--name", "tiny", "--port", "0"]
        command += ["--api-key", KEY, *common, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        self.port = int(self.url.split(":")[-1].split("/")[0])
        self.client = openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0, timeout=60)

    def call(self, method: str, path: str, body: str | bytes = b"", key: str = KEY) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text) if text.startswith(b"{") else text.decode()

    def ask(self, **fields: Any) -> tuple[int, Any]:
        return self.call("POST", "/v1/chat/completions", json.dumps(ASKED | fields))

    def read_metric(self, name: str) -> float:
        lines = self.call("GET", "/metrics")[1].splitlines()
        begin = f"vllm:{name} " if name.endswith("}") else f"vllm:{name}{{"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(begin))

    def wait_until_idle(self) -> None:
        """Wait until no request is left. Fails if some are after ten seconds."""
        for _ in range(200):
            if not self.read_metric("num_requests_running") + self.read_metric("num_requests_waiting"):
                return
            time.sleep(0.05)
        pytest.fail("requests are left")

    def end(self) -> int:
        """SIGTERM. Returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()


def answer(target: Target, **settings: Any) -> list[Answer]:
    return generate(target, MESSAGES, None, **{"max_new_tokens": 40, "text": True, **settings})
