"""The target's views of the examples on disk, made once: epochs after the first, and other heads, need no target.

Shapes: R rows of all examples of a shard, A answer rows of them, F feature width, S labels.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tqdm import tqdm

from heads.atomic_write import write_aside
from training.batches import plan_batches
from training.data import Example
from training.teacher import LABELS, Teacher, View

SHARD_TOKENS = 100_000
PASS_TOKENS = 4096  # of a forward pass of the target
SETTINGS, LOCK = "settings.json", ".lock"
FOREIGN = 0.1  # features of one text that differ by more, relatively, are not the same model's in whatever precision


class FeatureCache:
    """A folder of shards, each a safetensors file with the views of some examples.

    settings: what the views depend on (target, layers, data); a folder made with others is refused with a ValueError.
    A shard is written aside and renamed, so a kill loses at most the shard in the making.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self._places: dict[int, tuple[Path, int]] = {}
        self._shards: dict[Path, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / SETTINGS).exists():
            self._begin(settings)
        self._check_settings(settings)
        self.scan()

    def __contains__(self, number: int) -> bool:
        return number in self._places

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other training fills the folder, and let none begin to."""
        lock = FileLock(self.folder / LOCK)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            print(f"another training is filling {self.folder}: waiting for it", file=sys.stderr)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def scan(self) -> None:
        """Take note of the shards that are there by now. Raises ValueError for a damaged one."""
        for shard in sorted(self.folder.glob("*.safetensors")):
            if shard not in self._shards:
                self._register(shard)

    def fill(
        self, teacher: Teacher, examples: Sequence[Example], limit: int, process: int = 0, processes: int = 1
    ) -> None:
        """Add the views of all examples, in passes that do not depend on what is there, up to `limit` bytes.

        Each of several processes makes its share of the shards. Raises ValueError where what is there is not of these
        examples and this target.
        """
        self.scan()
        self._check_views(teacher, examples)
        shards = dict(list(_plan_shards(self.folder, examples))[process::processes])
        left = limit // processes - sum(path.stat().st_size for path in shards if path.exists())
        missing = {path: group for path, group in shards.items() if path not in self._shards}
        with _show(missing.values(), examples, silent=process > 0) as bar:
            for path, group in missing.items():
                told = [examples[number] for number in _flatten(group)]
                left -= _count_bytes(told, teacher)
                if left < 0:
                    return
                views = [view for batch in group for view in teacher.view([examples[number] for number in batch])]
                self._write(path, _flatten(group), views)
                bar.update(sum(len(example.tokens) for example in told))

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

    def _begin(self, settings: dict[str, Any]) -> None:
        if any(not entry.name.startswith(".") and entry.name != SETTINGS for entry in self.folder.iterdir()):
            raise ValueError(f"{self.folder} holds other things than cached features; choose a new folder")
        with self.locked():
            if not (self.folder / SETTINGS).exists():  # another training may have begun it meanwhile
                write_aside(self.folder / SETTINGS, lambda file: file.write(json.dumps(settings).encode()))

    def _check_settings(self, settings: dict[str, Any]) -> None:
        file = self.folder / SETTINGS
        try:
            stored = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file} is damaged ({error}); choose another folder") from error
        for name in sorted(settings):
            if stored.get(name) != settings[name]:
                raise ValueError(
                    f"the features in {self.folder} were made with {name} {stored.get(name)!r}, now it is "
                    f"{settings[name]!r}; choose another folder"
                )

    def _check_views(self, teacher: Teacher, examples: Sequence[Example]) -> None:
        """Raise ValueError where views are not of these examples, by their sizes, or, going by one, of this target."""
        fits = max(self._places, default=-1) < len(examples)
        for number, (path, place) in self._places.items() if fits else ():
            _, bounds, answers = self._shards[path]
            sizes = bounds[place + 1] - bounds[place], answers[place + 1] - answers[place]
            fits = fits and sizes == (len(examples[number].tokens), examples[number].answer_tokens)
        if fits and self._places:
            number = max(self._places)
            made = teacher.view([examples[number]])[0].features.float().cpu()
            fits = bool((made - self.view(number).features.float()).norm() < FOREIGN * made.norm())
        if not fits:
            raise ValueError(
                f"the features in {self.folder} are of other texts, or of another model at the same place; "
                "choose another folder"
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
        content = save(tensors)
        write_aside(path, lambda file: file.write(content))
        self._register(path)

    def _register(self, path: Path) -> None:
        try:
            shard = safe_open(path, framework="pt")
            numbers, bounds, answers = (shard.get_tensor(name).tolist() for name in ("numbers", "bounds", "answers"))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); delete it, and it is made again") from error
        self._shards[path] = (shard, bounds, answers)
        self._places.update({number: (path, place) for place, number in enumerate(numbers)})


def _flatten(batches: Sequence[Sequence[int]]) -> list[int]:
    """The numbers of several batches in one list."""
    return [number for batch in batches for number in batch]


def _plan_shards(folder: Path, examples: Sequence[Example]) -> Iterator[tuple[Path, list[list[int]]]]:
    """The shards of all examples: their files, and what is in them, as the target's passes."""
    group: list[list[int]] = []
    tokens = index = 0
    for batch in plan_batches([len(example.tokens) for example in examples], PASS_TOKENS, seed=0, epoch=0):
        group.append(batch)
        tokens += sum(len(examples[number].tokens) for number in batch)
        if tokens >= SHARD_TOKENS:
            yield folder / f"{index:05d}.safetensors", group
            group, tokens, index = [], 0, index + 1
    if group:
        yield folder / f"{index:05d}.safetensors", group


def _count_bytes(examples: Sequence[Example], teacher: Teacher) -> int:
    """What a shard of these takes at most."""
    target = teacher.target
    rows, answers = sum(len(example.tokens) for example in examples), sum(e.answer_tokens for e in examples)
    width = target.config.hidden_size * len(teacher.layers) * target.dtype.itemsize
    labels = min(LABELS, target.vocabulary) * (torch.int32.itemsize + torch.half.itemsize)
    return rows * width + answers * labels + 24 * len(examples) + 1024  # where each example is, and the file's header


def _show(groups: Iterable[list[list[int]]], examples: Sequence[Example], silent: bool) -> Any:
    """A progress bar over the tokens of some groups."""
    total = sum(len(examples[number].tokens) for group in groups for number in _flatten(group))
    interval = 1 if sys.stderr.isatty() else 60  # in a log, a line a minute is enough
    silent = silent or total == 0
    return tqdm(total=total, desc="features", unit=" tokens", unit_scale=True, mininterval=interval, disable=silent)


def _offsets(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)
