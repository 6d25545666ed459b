"""Training targets on disk, computed once: later epochs, and other heads that read the same layers, skip the model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tqdm import tqdm

from heads.atomic_write import write_aside
from training.data import Example
from training.teacher import LABELS, Batch, Targets, Teacher, collate
from training.trainer import plan_batches

SHARD_TOKENS = 100_000
PASS_TOKENS = 4096  # in one forward pass of the model
SETTINGS, LOCK = "settings.json", ".lock"


class FeatureCache:
    """A folder of safetensors files (shards) with the training targets of examples, by example number.

    settings: what the targets depend on: data, layers, fingerprints of the model. Raises ValueError if the folder was
    made with others.
    Shards are written atomically: a kill loses at most the shard being computed.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self._files: set[Path] = set()
        self._shards: dict[int, Any] = {}  # by example number
        folder.mkdir(parents=True, exist_ok=True)
        self._check_settings(settings)
        self.scan()

    def __contains__(self, number: int) -> bool:
        return number in self._shards

    def __getitem__(self, number: int) -> Targets:
        """The targets of one example."""
        return Targets(*(self._shards[number].get_tensor(f"{number}.{name}") for name in Targets._fields))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other training fills the folder, and keep others from filling it."""
        lock = FileLock(self.folder / LOCK)
        try:
            held = lock.acquire(blocking=False)
        except Timeout:
            print(f"another training is filling {self.folder}: waiting for it", file=sys.stderr)
            held = lock.acquire()
        with held:
            yield

    def scan(self) -> None:
        """Open new shards, of other processes too. Raises ValueError if one is damaged."""
        for shard in sorted(self.folder.glob("*.safetensors")):
            if shard in self._files:
                continue
            try:
                opened = safe_open(shard, framework="pt")
                numbers = [int(name.split(".")[0]) for name in opened.keys()]  # noqa: SIM118  (not a mapping)
            except (SafetensorError, ValueError) as error:
                raise ValueError(f"{shard} is damaged ({error}); delete it, and it is made again") from error
            self._files.add(shard)
            self._shards |= dict.fromkeys(numbers, opened)

    def fill(
        self, teacher: Teacher, examples: Sequence[Example], limit: int, process: int = 0, processes: int = 1
    ) -> None:
        """Add the targets of all examples, up to `limit` bytes. Forward passes do not depend on what is there already.

        Each of several processes computes its share of the shards.
        """
        self.scan()
        left = limit // processes
        missing: dict[Path, list[list[int]]] = {}
        for path, batches in list(_plan_shards(self.folder, examples))[process::processes]:
            left -= _count_bytes([examples[number] for number in chain(*batches)], teacher)
            if left >= 0 and path not in self._files:
                missing[path] = batches
        total = sum(len(examples[number].tokens) for batches in missing.values() for number in chain(*batches))
        shown = {"desc": "features", "unit": " tokens", "unit_scale": True, "disable": process > 0 or total == 0}
        interval = 1 if sys.stderr.isatty() else 60  # one line a minute in a log
        with tqdm(total=total, mininterval=interval, **shown) as bar:
            for path, batches in missing.items():
                targets = chain(*(teacher.compute([examples[number] for number in batch]) for batch in batches))
                self._write(path, dict(zip(chain(*batches), targets, strict=True)))
                bar.update(sum(len(examples[number].tokens) for number in chain(*batches)))

    def _check_settings(self, settings: dict[str, Any]) -> None:
        """Compare the folder's settings with these; a new folder gets these."""
        file = self.folder / SETTINGS
        if not file.exists():
            if any(not entry.name.startswith(".") and entry != file for entry in self.folder.iterdir()):
                raise ValueError(f"{self.folder} holds other things than cached features; choose a new folder")
            with self.locked():
                if not file.exists():  # another training may have written them meanwhile
                    write_aside(file, lambda stream: stream.write(json.dumps(settings).encode()))
        try:
            stored = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file} is damaged ({error}); choose another folder") from error
        if changed := " and ".join(name for name in settings if stored.get(name) != settings[name]):
            raise ValueError(f"the features in {self.folder} were made with other {changed}; choose another folder")

    def _write(self, path: Path, targets: dict[int, Targets]) -> None:
        """Store the targets of examples by number: labels as int32, probabilities in half precision."""
        tensors: dict[str, torch.Tensor] = {}
        for number, one in targets.items():
            parts = one.features, one.labels.int(), one.probabilities.half()
            named = zip(Targets._fields, parts, strict=True)
            tensors |= {f"{number}.{name}": part.cpu().contiguous() for name, part in named}
        content = save(tensors)
        write_aside(path, lambda file: file.write(content))
        self.scan()


class BatchLoader:
    """Loads the batch of the examples with the given numbers. The teacher computes what is not in the cache."""

    def __init__(self, examples: Sequence[Example], teacher: Teacher, cache: FeatureCache | None = None) -> None:
        self.examples, self.teacher, self.cache = examples, teacher, cache

    def __call__(self, numbers: Sequence[int]) -> Batch:
        cache: Any = self.cache or {}
        targets = {
            number: send_to_device(cache[number], self.teacher.target.device, non_blocking=True)
            for number in numbers
            if number in cache
        }
        if missing := [number for number in numbers if number not in targets]:
            computed = self.teacher.compute([self.examples[number] for number in missing])
            targets |= dict(zip(missing, computed, strict=True))
        return collate([self.examples[number] for number in numbers], [targets[number] for number in numbers])


def _plan_shards(folder: Path, examples: Sequence[Example]) -> Iterator[tuple[Path, list[list[int]]]]:
    """The files of all shards in order, and their examples in batches of one forward pass."""
    shards: list[list[list[int]]] = []
    tokens = SHARD_TOKENS
    for batch in plan_batches([len(example.tokens) for example in examples], PASS_TOKENS, seed=0, epoch=0):
        if tokens >= SHARD_TOKENS:
            shards.append([])
            tokens = 0
        shards[-1].append(batch)
        tokens += sum(len(examples[number].tokens) for number in batch)
    return ((folder / f"{index:05d}.safetensors", batches) for index, batches in enumerate(shards))


def _count_bytes(examples: Sequence[Example], teacher: Teacher) -> int:
    """An upper bound for the size of a shard of these examples."""
    target = teacher.target
    rows, answers = sum(len(example.tokens) for example in examples), sum(e.answer_tokens for e in examples)
    width = target.config.hidden_size * len(teacher.layers) * target.dtype.itemsize
    labels = min(LABELS, target.vocabulary) * (torch.int32.itemsize + torch.half.itemsize)
    return rows * width + answers * labels + 320 * len(examples) + 64  # the header describes three tensors an example
