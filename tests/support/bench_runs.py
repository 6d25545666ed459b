"""Runs of bench.py with tiny models, for its tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.models import cost_curve
from scripts import bench

QUESTIONS: list[dict[str, Any]] = [
    {"question_id": 81, "category": "writing", "turns": ["abcabcabc", "again"], "reference": ["x"]},
    {"question_id": 111, "category": "math", "turns": ["1+1=", "why?"]},
    {"question_id": 321, "category": "qa", "turns": ["Where is it? Where is"]},
    {"question_id": 322, "category": "qa", "turns": ["Who?"]},
]


def make_bench(save_model: Callable[..., Path], folder: Path) -> Callable[..., dict[str, Any] | None]:
    """A function that runs bench.py on the questions with a tiny model, and returns what `--json` wrote, if given.

    save_model: the fixture. folder: for the file of questions.
    """
    target = save_model(num_hidden_layers=3)
    draft = save_model(num_hidden_layers=1, seed=1)
    questions = folder / "few.jsonl"
    questions.write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n\n")

    def run(*options: str, json_file: Path | None = None) -> dict[str, Any] | None:
        command = ["--questions", questions, "--model", target, "--draft-model", draft, "--dtype", "float64"]
        command += ["--device", "cpu", "--max-new-tokens", "20", "--threads", "1", *options]
        bench.main([*map(str, command), *(["--json", str(json_file)] if json_file else [])])
        return json.loads(json_file.read_text()) if json_file else None

    return run


@contextmanager
def hurry_bench() -> Iterator[None]:
    """One thread is fastest for tiny models, and costs are measured in one round: no test depends on them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_curve, "PATIENCE", 0.0)
        yield
    torch.set_num_threads(threads)
