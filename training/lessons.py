"""Batches for the trainer: examples with the target's view of them, from the disk or made on the spot."""

from __future__ import annotations

from collections.abc import Sequence

from training.cache import FeatureCache
from training.data import Example
from training.teacher import Lesson, Teacher, View, make_lesson


class Lessons:
    """Makes the `Lesson` of some examples. What the cache lacks, and without a cache everything, the teacher makes."""

    def __init__(self, examples: Sequence[Example], teacher: Teacher, cache: FeatureCache | None = None) -> None:
        self.examples, self.teacher, self.cache = examples, teacher, cache

    def __call__(self, numbers: Sequence[int]) -> Lesson:
        views: dict[int, View] = {}
        if self.cache is not None:
            device = self.teacher.target.device
            views = {number: self.cache.view(number).to(device) for number in numbers if number in self.cache}
        missing = [number for number in numbers if number not in views]
        if missing:
            made = self.teacher.view([self.examples[number] for number in missing])
            views |= dict(zip(missing, made, strict=True))
        return make_lesson([self.examples[number] for number in numbers], [views[number] for number in numbers])
