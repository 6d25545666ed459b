"""A stock model that knows what its forward passes cost.

Measured cost curves are kept in the user's cache, so that later starts measure nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from tqdm import tqdm
from transformers import PreTrainedModel

from decode.cpu.build_cache import environment
from decode.cpu.compiled_layers import compiled_layers
from decode.models.cost_curve import (
    CONTEXTS,
    SIZES,
    STEP,
    CostCurve,
    fixed_curve,
    for_batch,
    measure_cost_curve,
    measured_batches,
    measured_contexts,
)
from decode.models.stock_model import StockModel
from decode.models.user_cache import PARTIAL, scratch, user_cache
from decode.session import Session

PACKAGE = Path(__file__).parents[1]


class TimedModel(StockModel):
    """A stock model with its cost curves. deterministic: see `decode.target.Target`."""

    def __init__(self, model: PreTrainedModel, deterministic: bool | CostCurve) -> None:
        super().__init__(model)
        self.deterministic = deterministic
        self._cost_curves: dict[tuple[int, int], CostCurve] = {}  # by batch and context
        self._batch_curves: dict[tuple[int, int], CostCurve] = {}  # the same, where padding is skipped

    def open(self, batch_size: int, layers: Sequence[int] = ()) -> Session:
        """An empty KV cache for `batch_size` rows. layers: the hidden states that a verdict carries as features."""
        return Session(self, batch_size, layers)

    def warm_up(self, batch_size: int = 1) -> None:
        """Measure the cost curves of batches of up to `batch_size` rows, which would otherwise delay an answer.

        Nothing is measured twice: curves are kept in the user's cache.
        """
        if self.deterministic:
            return
        batch_size = 1 if self.passes_flat else batch_size
        wanted = [(rows, context) for rows in measured_batches(batch_size) for context in measured_contexts(self, rows)]
        missing = [each for each in wanted if each not in self._cost_curves]
        # The bar appears only if this takes longer than a second.
        for each in tqdm(missing, desc="draftless: measuring forward passes", delay=1, leave=False, disable=None):
            self.cost_curve(*each)

    def cost_curve(self, batch_size: int = 1, context: int = CONTEXTS[0]) -> CostCurve:
        """The cost of verifying N nodes relative to one node, after `context` committed tokens.

        Measured now unless `warm_up` has done it or the user's cache has it. Where padding is skipped, the curve of a
        batch follows from that of one text. Else batch sizes are rounded up to powers of four. Contexts are rounded up
        to multiples of 64. Between the measured contexts the seconds are linear, beyond them constant.
        With `deterministic` nothing is measured, and the context does not count.
        context: where padding is skipped, the average of the rows, else the longest (`cost_after` chooses).
        """
        if self.deterministic:
            return self._find_fixed_curve(batch_size)
        context = min(-(-max(context, 1) // STEP) * STEP, measured_contexts(self, 1)[-1])
        if self.passes_flat and batch_size > 1:
            if (batch_size, context) not in self._batch_curves:
                single, each_row = TimedModel.cost_curve(self, 1, context), context * self._slot_seconds
                self._batch_curves[batch_size, context] = for_batch(single, batch_size, each_row)
            return self._batch_curves[batch_size, context]
        rows = measured_batches(batch_size)[-1]
        contexts = measured_contexts(self, rows)
        context = min(max(context, contexts[0]), contexts[-1])
        key = rows, context
        if key not in self._cost_curves:
            if context in contexts:
                self._cost_curves[key] = self._find_curve(rows, context)
            else:
                share = (context - contexts[0]) / (contexts[1] - contexts[0])
                shortest, longest = (TimedModel.cost_curve(self, rows, each) for each in contexts)
                self._cost_curves[key] = shortest.blend(longest, share)
        return self._cost_curves[key]

    def cost_after(self, texts: Sequence[Sequence[int]]) -> CostCurve:
        """The cost curve of a batch of these texts."""
        lengths = [*map(len, texts)]
        return self.cost_curve(len(texts), sum(lengths) // len(lengths) if self.passes_flat else max(lengths))

    @property
    def _slot_seconds(self) -> float:
        """The time in which attention reads one more committed token; 0 if only one context is measured."""
        first, *more = measured_contexts(self, 1)
        short, long = (TimedModel.cost_curve(self, 1, each).seconds[0] for each in (first, *more, first)[:2])
        return max(long - short, 0.0) / (more[0] - first) if more else 0.0

    def _find_fixed_curve(self, rows: int) -> CostCurve:
        if (1, 0) not in self._cost_curves:  # no context of a measured one
            self._cost_curves[1, 0] = fixed_curve(self.deterministic, self.backend)
        return self._cost_curves.setdefault((rows, 0), for_batch(self._cost_curves[1, 0], rows))

    def _find_curve(self, rows: int, context: int) -> CostCurve:
        """The curve in the user's cache, or one that is measured now and kept there."""
        file = curve_file(self, rows, context)
        curve = load_curve(file)
        if curve is None:
            try:
                curve = measure_cost_curve(self.open(rows), context)
            except torch.OutOfMemoryError:  # what is decoded may need less
                if rows == 1 and context == CONTEXTS[0]:
                    raise
            else:
                save_curve(file, curve)
        return curve or TimedModel.cost_curve(self, rows if context > CONTEXTS[0] else rows // 4)


def curve_file(target: StockModel, batch: int, context: int) -> Path | None:
    """Where a curve is kept, named after a digest of what it depends on. None for models that keep no curves.

    Those are models on several devices, or on one without a name: their speed depends on more.
    """
    model, device = target.model, target.backend.name
    if device is None or any(hasattr(module, "_hf_hook") for module in model.modules()):
        return None
    config = sorted(item for item in target.config.to_dict().items() if item[0] != "_name_or_path")
    settings = config, target.config._attn_implementation, target.dtype
    machine = device, torch.get_num_threads(), torch.get_float32_matmul_precision(), environment()
    versions = transformers.__version__, _digest_package()
    # A model's repr tells packed, quantized and adapted layers apart. Addresses in it change with every start.
    mode = bool(compiled_layers(model)), target.has_graphs
    key = repr((batch, context, settings, repr(model), mode, machine, versions))
    digest = hashlib.sha256(re.sub(" at 0x[0-9a-f]+", "", key).encode()).hexdigest()
    try:
        return user_cache() / "curves" / f"{digest}.json"
    except RuntimeError:  # the user has no home folder
        return None


def load_curve(file: Path | None) -> CostCurve | None:
    """The curve in a file; None if there is none, or the file is damaged."""
    try:
        seconds = [float(each) for each in json.loads(file.read_text())["seconds"]] if file is not None else []
    except (OSError, ValueError, TypeError, KeyError):
        return None
    is_whole = 1 < len(seconds) <= len(SIZES) and all(0 < each < inf for each in seconds)
    return CostCurve(SIZES[: len(seconds)], seconds) if is_whole else None


def save_curve(file: Path | None, curve: CostCurve) -> None:
    """Keep a curve if the cache can be written."""
    if file is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            aside = file.parent.with_suffix(PARTIAL)
            with FileLock(aside.with_suffix(".lock")), scratch(aside) as folder:
                new = folder / file.name
                new.write_text(json.dumps({"seconds": curve.seconds}))
                new.replace(file)


@cache
def _digest_package() -> str:
    """A digest of this package's source files: any of them may have made passes faster."""
    files = sorted(file for file in PACKAGE.rglob("*") if file.suffix in (".py", ".cpp", ".h"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
