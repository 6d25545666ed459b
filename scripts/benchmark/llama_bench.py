"""llama.cpp's benchmark program, llama-bench."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

REPETITIONS = 3  # passes of each size in a run of the program
DESCRIPTION = ("model_type", "model_n_params", "build_commit")


class LlamaBench:
    """llama-bench with a model file. Raises ValueError if the program fails with it.

    context: tokens before a pass; 0 if this version of the program has no such option.
    """

    def __init__(self, program: str, model: str, threads: int, context: int) -> None:
        self.program, self.model, self.threads = program, model, threads
        self.context = context if "--n-depth" in self._run("--help") else 0
        entry = self._measure([1], 1)[1]
        self.description = {name: entry[name] for name in DESCRIPTION}

    def time(self, sizes: Sequence[int]) -> list[list[float]]:
        """For each size the milliseconds of a few passes: one generated token, or a prompt of several."""
        entries = self._measure(sizes, REPETITIONS)
        return [[spent / 1e6 for spent in entries[size]["samples_ns"]] for size in sizes]

    def _measure(self, sizes: Sequence[int], repetitions: int) -> dict[int, dict[str, Any]]:
        """What the program prints for each size."""
        prompts = ",".join(str(size) for size in sizes if size > 1) or 0
        depth = ["-d", self.context] if self.context else []
        settings = ["-r", repetitions, "-t", self.threads, *depth, "-o", "json"]
        text = self._run("-m", self.model, "-n", 1, "-p", prompts, *settings)
        try:
            entries = {entry["n_prompt"] or 1: entry for entry in json.loads(text)}
            return {size: {name: entries[size][name] for name in (*DESCRIPTION, "samples_ns")} for size in sizes}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.program} did not print llama-bench's JSON ({error!r})") from error

    def _run(self, *options: Any) -> str:
        ended = subprocess.run([self.program, *map(str, options)], capture_output=True, text=True)
        if ended.returncode:
            reason = ended.stderr.strip() or "it printed no reason"
            raise ValueError(f"{self.program} failed with status {ended.returncode}: {reason}")
        return ended.stdout
