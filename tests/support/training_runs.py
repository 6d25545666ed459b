"""A tiny target whose text is easy to predict, and trainings of heads on it.

They run in this process, or in processes that can be killed.
"""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import os
import random
import signal
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel

import draftless_commands.train
import training.checkpoint
import training.feature_cache
import training.trainer
from draftless_commands.head_training import measurements, parts
from heads.atomic_write import write_aside
from tests.support.models import VOCABULARY, limit_threads, tiny
from training.checkpoint import CHECKPOINT, Metrics, read_metrics
from training.teacher import Teacher
from training.trainer import Trainer

OPTIONS = ["--kind", "medusa", "--batch-tokens", "512", "--device", "cpu", "--dtype", "float32"]
SHAPE = ["--heads", "3", "--layers", "2"]  # of several heads
ADAMW = "--adamw"  # in these tests only: no Muon, which computes in bfloat16 and amplifies rounding
NEW_TOKENS = 41  # with a prompt of at most 6 in the 48 positions that the target was trained on
PLANNED = 1 + measurements.TRIALS  # batches that the plan before a training measures
SHARD_TOKENS, PASS_TOKENS = 1000, 500  # so that small data has several shards
FIRST = 3  # smaller ids are special tokens


@cache
def train_predictable(layers: int = 1, kind: str = "llama", **sizes: int) -> PreTrainedModel:
    """A tiny model trained to continue `walk`, in which each token has one successor."""
    torch.manual_seed(0)
    model = tiny(kind, dtype=torch.float32, num_hidden_layers=layers, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(200):
        starts = torch.randint(FIRST, VOCABULARY, (16,)).tolist()
        tokens = torch.tensor([walk(start, 48) for start in starts])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def walk(start: int, length: int) -> list[int]:
    """`length` tokens, beginning with `start`."""
    tokens = [start]
    while len(tokens) < length:
        tokens.append(FIRST + (7 * (tokens[-1] - FIRST) + 5) % (VOCABULARY - FIRST))
    return tokens


def write_answers(file: Path, rows: int, seed: int = 0) -> Path:
    """Walks as rows of `prompt` and `response`, spelt for the tokenizer of `save_model`."""
    choose = random.Random(seed)
    lines = []
    for _ in range(rows):
        length = choose.randint(2, 6)
        tokens = walk(choose.randrange(FIRST, VOCABULARY), length + 24)
        text = "".join(chr(32 + token - FIRST) for token in tokens)
        lines.append(json.dumps({"prompt": text[:length], "response": text[length:], "finished": False}))
    file.write_text("\n".join(lines) + "\n")
    return file


def save_predictable(folder: Path, rows: int, layers: int = 1) -> Path:
    """Turn a folder of `save_model` into the predictable target without a chat template, with some of its answers."""
    with limit_threads(1):
        train_predictable(layers).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    write_answers(folder / "answers.jsonl", rows)
    return folder


def train(place: Path, out: Path, *options: str) -> int:
    """Train a head on the answers in the target's folder. Returns the exit status."""
    AcceleratorState._reset_state(reset_partial_state=True)
    given = ["--model", str(place), "--data", str(place / "answers.jsonl"), "--out", str(out), *OPTIONS]
    shape = SHAPE[:2] if {"peagle", "multi-token"} & {*options} else SHAPE
    has_no_shape = {"eagle", "eagle3", "jump", "mtp", "draft"} & {*options} or any(
        ".py:" in option for option in options
    )
    given += [] if has_no_shape else shape
    given += [option for option in options if option != ADAMW]
    with pytest.MonkeyPatch.context() as patch:
        if ADAMW in options:
            patch.setattr(training.trainer, "is_hidden", lambda *_: False)
        patch.setattr(measurements, "NEW_TOKENS", NEW_TOKENS)
        patch.setattr(training.feature_cache, "SHARD_TOKENS", SHARD_TOKENS)
        patch.setattr(training.feature_cache, "PASS_TOKENS", PASS_TOKENS)
        try:
            with limit_threads(1):  # more round sums differently
                draftless_commands.train.main(given)
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def losses(out: Path) -> list[dict[str, Any]]:
    """The logged steps."""
    return [row for row in read_metrics(out) if "loss" in row]


def assert_same(out: Path, other: Path) -> None:
    """Two trainings have bit-identical results: losses, validations, weights, optimizer state and the saved head."""
    assert read_metrics(out) == read_metrics(other)
    one, two = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (out, other))
    assert one["progress"] == two["progress"]
    optimizers = ([each["state"] for each in saved["optimizers"]] for saved in (one, two))
    heads = (load_file(folder / "model.safetensors") for folder in (out, other))
    for tensors, others in ((one["weights"], two["weights"]), optimizers, heads):
        torch.testing.assert_close(tensors, others, rtol=0, atol=0)


class Fuse:
    """Kills its own process, as kill -9 does, at the n-th of the moments in which that could do most harm."""

    def __init__(self, moments: int) -> None:
        self.moments = moments

    def burn(self) -> None:
        self.moments -= 1
        if self.moments == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def lay(self) -> None:
        """Set moments before and after each target pass, step, validation and renaming, and within each file."""
        for owner, name in ((Teacher, "compute"), (Trainer, "_step"), (Trainer, "_validate"), (os, "replace")):
            setattr(owner, name, self._around(getattr(owner, name)))
        training.feature_cache.write_aside = training.checkpoint.write_aside = self._write
        Metrics.add = self._in_two(Metrics.add)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.burn()
            result = function(*arguments)
            self.burn()
            return result

        return call

    def _write(self, path: Path, write: Callable[[Any], Any]) -> None:
        whole = io.BytesIO()
        write(whole)
        content = whole.getvalue()
        half = len(content) // 2

        def write_slowly(file: Any) -> None:
            file.write(content[:half])
            file.flush()
            self.burn()
            file.write(content[half:])

        write_aside(path, write_slowly)

    def _in_two(self, add: Callable[..., None]) -> Callable[..., None]:
        def call(metrics: Metrics, **row: Any) -> None:
            size = metrics.file.stat().st_size
            with metrics.file.open("a") as file:
                file.write('{"step": 0, "los')
            self.burn()
            os.truncate(metrics.file, size)
            add(metrics, **row)

        return call


def train_until(moments: int, *arguments: Any) -> None:
    """`train`, killed at a moment of the fuse; for a process of its own."""
    torch.set_num_threads(1)
    Fuse(moments).lay()
    train(*arguments)


def stop_at(step: int, by: int = signal.SIGTERM) -> Callable[..., Any]:
    """A replacement of `Trainer._step` that sends its own process a signal in that step."""
    make, count = Trainer._step, itertools.count(1)

    def call(*arguments: Any) -> Any:
        if next(count) == step:
            os.kill(os.getpid(), by)
        return make(*arguments)

    return call


def stop_and_resume(step: int, place: Path, out: Path, *options: str, by: int = signal.SIGTERM) -> None:
    """A training that gets a signal in this step, and then goes on to its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", stop_at(step, by))
        assert train(place, out, *options) == 128 + by
    assert torch.load(out / CHECKPOINT, weights_only=True)["progress"]["step"] == step
    assert train(place, out, *options, "--resume") == 0


def train_as_one_of(process: int, processes: int, port: int, stop: int, *arguments: Any) -> None:
    """`train`, in one of several processes; the last one gets a SIGTERM in step `stop`. Only the first may write."""
    torch.set_num_threads(1)
    os.environ |= {name: str(process) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if process > 0:
        training.checkpoint.write_aside = parts.save_head = Metrics.add = _refuse
    if process == processes - 1:
        Trainer._step = stop_at(stop)
    raise SystemExit(train(*arguments))


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("only the first process may write")


def start(task: Callable[..., None], *arguments: Any) -> Any:
    """A new process that shares only the imports, which are done once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=task, args=arguments)
    process.start()
    return process


def train_together(*arguments: Any, stop: int = 0) -> list[int]:
    """`train` with two processes. Returns their exit statuses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [start(train_as_one_of, number, 2, port, stop, *arguments) for number in range(2)]
    for process in started:
        process.join(300)
    return [process.exitcode for process in started]
