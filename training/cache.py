"""The target's views of the examples on disk, made once: epochs after the first, and other heads, need no target.

Shapes: R rows of all examples of a shard, A answer rows of them, F feature width, S labels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from training.batches import plan_batches
from training.data import Example
from training.teacher import Teacher, View

SHARD_TOKENS = 100_000
PASS_TOKENS = 4096  # of a forward pass of the target
SETTINGS = "settings.json"


class FeatureCache:
    """A folder of shards, each a safetensors file with the views of some examples.

    settings: what the views depend on (target, layers, data); a folder made with others is refused with a ValueError.
    A shard is written aside and renamed, so a kill loses at most the shard in the making.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / SETTINGS
        if not file.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds other things than cached features; choose a new folder")
        if not file.exists():
            write_aside(file, lambda aside: aside.write_text(json.dumps(settings)))
        stored = json.loads(file.read_text())
        for name in sorted(settings):
            if stored.get(name) != settings[name]:
                raise ValueError(
                    f"the features in {folder} were made with {name} {stored.get(name)!r}, now it is "
                    f"{settings[name]!r}; choose another folder"
                )
        self._places: dict[int, tuple[Path, int]] = {}
        self._shards: dict[Path, Any] = {}
        for shard in sorted(folder.glob("*.safetensors")):
            self._register(shard)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    @property
    def bytes(self) -> int:
        """What the shards take on disk."""
        return sum(shard.stat().st_size for shard in self._shards)

    def fill(self, teacher: Teacher, examples: Sequence[Example], limit: int) -> None:
        """Add the views of all examples, in batches that do not depend on what is there, up to `limit` bytes."""
        todo = list(_group(examples))
        missing = sum(any(number not in self for number in chain(group)) for group in todo)
        total = sum(len(example.tokens) for example in examples)
        with tqdm(total=total, desc="features", unit=" tokens", unit_scale=True, disable=not missing) as progress:
            for index, group in enumerate(todo):
                numbers = chain(group)
                if any(number not in self for number in numbers):
                    if self.bytes >= limit:
                        break
                    views = [view for batch in group for view in teacher.view([examples[number] for number in batch])]
                    self._write(self.folder / f"{index:05d}.safetensors", numbers, views)
                progress.update(sum(len(examples[number].tokens) for number in numbers))

    def view(self, number: int) -> View:
        """The view of one example."""
        path, place = self._places[number]
        shard, bounds, answers = self._shards[path]
        begin, end = bounds[place : place + 2]
        first, last = answers[place : place + 2]
        return View(
            shard.get_slice("features")[begin:end],
            shard.get_slice("labels")[first:last],
            shard.get_slice("chances")[first:last],
        )

    def _write(self, path: Path, numbers: list[int], views: list[View]) -> None:
        tensors = {
            "features": torch.cat([view.features for view in views]).cpu(),  # [R, F]
            "labels": torch.cat([view.labels for view in views]).int().cpu(),  # [A, S]
            "chances": torch.cat([view.chances for view in views]).half().cpu(),  # [A, S]
            "numbers": torch.tensor(numbers),
            "bounds": _offsets([len(view.features) for view in views]),
            "answers": _offsets([len(view.labels) for view in views]),
        }
        write_aside(path, lambda aside: save_file(tensors, aside))
        self._register(path)

    def _register(self, path: Path) -> None:
        try:
            shard = safe_open(path, framework="pt")
            numbers, bounds, answers = (shard.get_tensor(name).tolist() for name in ("numbers", "bounds", "answers"))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); delete it, and it is made again") from error
        self._shards[path] = (shard, bounds, answers)
        self._places.update({number: (path, place) for place, number in enumerate(numbers)})


def write_aside(path: Path, write: Any) -> None:
    """Let `write(file)` make a file under another name and rename it: it is there whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(aside)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def chain(batches: Sequence[Sequence[int]]) -> list[int]:
    """The numbers of several batches in one list."""
    return [number for batch in batches for number in batch]


def _group(examples: Sequence[Example]) -> Iterator[list[list[int]]]:
    """Batches of examples, those of one shard together."""
    group: list[list[int]] = []
    tokens = 0
    for batch in plan_batches([len(example.tokens) for example in examples], PASS_TOKENS, seed=0, epoch=0):
        group.append(batch)
        tokens += sum(len(examples[number].tokens) for number in batch)
        if tokens >= SHARD_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _offsets(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)
