"""The cost of a forward pass over N nodes, relative to one node, measured on the model and device at hand.

On a large GPU, 60 nodes cost as much as one; on a CPU, three times as much. The size of a draft tree depends on it.
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
from time import perf_counter

import torch
import transformers
from torch import distributed
from tqdm import tqdm

from decode.devices.cost_curve import CostCurve, StepTimes
from decode.devices.user_cache import environment, print_notice_once, user_cache
from decode.models.facts import has_hooks
from decode.models.stock_model import StockModel
from decode.session import Session
from decode.trees.tree import Tree

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
CONTEXTS = (256, 4096)  # committed tokens while measuring
STEP = 64  # other contexts are rounded up to its multiples
MAX_CACHED = 1 << 16  # committed tokens of all rows together while measuring: their keys and values take gigabytes
MAX_COST = 4.0  # larger sizes than the first above this cost are not timed: few trees gain that much
SATURATION = 0.9  # unless nodes get cheaper: of the average node's time, what one more takes there at most
FEW, EXPENSIVE = 4, 2.5  # a pass over so many nodes at such a cost is worth a notice
ROUNDS, PATIENCE = 5, 2.0  # passes of each size; seconds after which no further round begins
WARM = 3  # passes of a size up to the first one that counts
PACKAGE = Path(__file__).parent


class Costs:
    """What a target's forward passes cost. Curves are measured when they are first asked for, and kept in the user's
    cache, so that later starts measure nothing.

    fixed: nothing is measured; True stands for the curve of the kind of device and weights. steps: what steps took.
    """

    def __init__(self, fixed: bool | CostCurve) -> None:
        if not isinstance(fixed, bool | CostCurve):
            raise TypeError(f"deterministic is {fixed!r}; it is True, False or a CostCurve")
        self.fixed, self.steps = fixed, StepTimes()
        self._measured: dict[tuple[int, int], CostCurve] = {}  # by rows and context
        self._derived: dict[tuple[int, int], CostCurve] = {}  # the same, of batches whose curve follows from one row's

    def warm_up(self, target: StockModel, rows: int) -> None:
        """Measure the curves of batches of up to so many rows."""
        if self.fixed:
            return
        if self.steps.contradicted:
            self._forget(target)
        rows = 1 if target.passes_flat else rows
        wanted = [(batch, context) for batch in measured_batches(rows) for context in measured_contexts(target, batch)]
        missing = [each for each in wanted if each not in self._measured]
        # The bar appears only if this takes longer than a second.
        for each in tqdm(missing, desc="draftless: measuring forward passes", delay=1, leave=False, disable=None):
            self.find(target, *each)

    def find(self, target: StockModel, rows: int, context: int) -> CostCurve:
        """The curve of so many rows after `context` tokens.

        Where a pass is flat, the curve of a batch follows from that of one row. Else numbers of rows are rounded up to
        powers of four. Contexts are rounded up to multiples of `STEP`. Seconds are linear in the context, and constant
        below the first that is measured.
        """
        if self.fixed:
            return self._find_fixed(target, rows)
        context = -(-max(context, 1) // STEP) * STEP
        if target.passes_flat and rows > 1:
            found = self._derived.get((rows, context))  # another thread may forget them all
            if found is None:
                single = self.find(target, 1, context)
                found = self._derived[rows, context] = for_batch(single, rows, context * self._time_slot(target))
            return found
        rows = measured_batches(rows)[-1]
        contexts = measured_contexts(target, rows)
        context = max(context, contexts[0]) if len(contexts) > 1 else contexts[0]
        found = self._measured.get((rows, context))
        if found is None:
            if context in contexts:
                found = self._measure(target, rows, context)
            else:
                share = (context - contexts[0]) / (contexts[1] - contexts[0])
                shortest, longest = (self.find(target, rows, each) for each in contexts)
                found = shortest.blend(longest, share)
            self._measured[rows, context] = found
        return found

    def _forget(self, target: StockModel) -> None:
        """Forget all curves, those in the user's cache too: they were measured while the machine was busy."""
        for rows, context in [*self._measured]:
            if context in CONTEXTS and (file := curve_file(target, rows, context)) is not None:
                with suppress(OSError):
                    file.unlink()
        self.steps, self._measured, self._derived = StepTimes(), {}, {}

    def _find_fixed(self, target: StockModel, rows: int) -> CostCurve:
        """The same in every run. In a `torch.distributed` group the first rank's, so all ranks must call this."""
        if (1, 0) not in self._derived:
            known = target.backend.find_fixed_costs(target.model)
            curves = [self.fixed if isinstance(self.fixed, CostCurve) else CostCurve(*known)]
            if distributed.is_available() and distributed.is_initialized():
                distributed.broadcast_object_list(curves, src=0)
            self._derived[1, 0] = curves[0]
        if (rows, 0) not in self._derived:
            self._derived[rows, 0] = for_batch(self._derived[1, 0], rows)
        return self._derived[rows, 0]

    def _time_slot(self, target: StockModel) -> float:
        """The seconds in which attention reads one more committed token; 0 if only one context is measured."""
        first, *more = measured_contexts(target, 1)
        short, long = (self.find(target, 1, each).seconds[0] for each in (first, *more, first)[:2])
        return max(long - short, 0.0) / (more[0] - first) if more else 0.0

    def _measure(self, target: StockModel, rows: int, context: int) -> CostCurve:
        """The curve in the user's cache, or one that is measured now and kept there."""
        file = curve_file(target, rows, context)
        curve = load_curve(file)
        if curve is None:
            try:
                curve = measure_cost_curve(target.open(rows), context)
            except torch.OutOfMemoryError:  # what is decoded may need less
                if rows == 1 and context == CONTEXTS[0]:
                    raise
            else:
                save_curve(file, curve)
        if curve is not None and curve(FEW) > EXPENSIVE and rows == 1 and context == CONTEXTS[0]:
            times = f"a pass over {FEW} tokens takes {curve(FEW):.1f} times as long as over one"
            print_notice_once("expensive nodes", f"{times} with this model here: few drafts will be worth their time")
        return curve or self.find(target, rows if context > CONTEXTS[0] else rows // 4, CONTEXTS[0])


def for_batch(curve: CostCurve, rows: int, each_row: float = 0.0) -> CostCurve:
    """The curve of a batch, by the average nodes of a row, if time depends on the tokens of all rows together.

    each_row: the seconds in which a pass reads the keys and values of one more row.
    """
    tokens = sorted({rows, *(size for size in curve.sizes if size > rows), *(rows * size for size in SIZES[1:])})
    seconds = [curve.seconds[0] * curve(count) + (rows - 1) * each_row for count in tokens]
    return CostCurve([count / rows for count in tokens], seconds)


def measured_batches(batch: int) -> list[int]:
    """The powers of four up to the first that is at least `batch`."""
    return [4**exponent for exponent in range(((batch - 1).bit_length() + 1) // 2 + 1)]


def measured_contexts(target: StockModel, batch: int) -> list[int]:
    """The first of `CONTEXTS`; the second too if the model has so many positions and `MAX_CACHED` allows it."""
    longest = min(target.context - 1, MAX_CACHED // batch)
    return [CONTEXTS[0], *(context for context in CONTEXTS[1:] if context <= longest)]


def is_worth_timing(times: Sequence[float]) -> bool:
    """Whether to time a larger size than the last one.

    The first nodes of a mixture of experts are expensive, because each reads experts of its own. They get cheaper when
    most experts are read: there a large tree can be worth its time where a small one is not.
    """
    if times[-1] <= MAX_COST * times[0]:
        return True
    (size, more), added = SIZES[len(times) - 2 : len(times)], times[-1] - times[-2]
    return added / (more - size) < SATURATION * (times[-1] - times[0]) / (more - 1)


@torch.inference_mode()  # as in the loop
def measure_cost_curve(session: Session, context: int) -> CostCurve:
    """The cost curve of an empty session's batch size after `context` committed tokens, or as many as the model has
    positions for.

    The shortest of several rounds, because other work on the machine only adds.
    """
    fill(session, min(context, session.target.context - 1))
    trees = [random_chain(size, len(session.lengths), session.target) for size in SIZES]
    times: list[float] = []
    while len(times) < len(trees) and (not times or is_worth_timing(times)):
        try:
            # The first passes of a shape are slow. With CUDA graphs, the second one captures it.
            times.append([time_pass(session, trees[len(times)]) for _ in range(WARM)][-1])
        except torch.OutOfMemoryError:  # trees of that size cannot be verified anyway
            if len(times) < 2:
                raise
            break
    rounds, begun = [times], perf_counter()
    while len(rounds) < ROUNDS and perf_counter() - begun < PATIENCE:
        rounds.append([time_pass(session, tree) for tree in trees[: len(times)]])
    return CostCurve(SIZES[: len(times)], [*map(min, zip(*rounds, strict=True))])


def fill(session: Session, context: int) -> Session:
    """The session, as if `context` tokens of each row were committed; their keys and values are zeros."""
    rows = len(session.lengths)
    session.cache.lengths = [context - 1] * rows
    session.verify(random_chain(1, rows, session.target))
    session.keep([[0]] * rows)
    for states in session.cache.states:
        states.zero_()  # memory that was never written to is read faster
    return session


def random_chain(size: int, batch: int, target: StockModel) -> Tree:
    """A chain of random tokens: equal tokens would all go to the same few experts of a mixture."""
    tokens = torch.randint(target.vocabulary, (batch, size), generator=torch.Generator().manual_seed(size))
    return Tree.chain(tokens.tolist(), target.device)


def time_pass(session: Session, tree: Tree) -> float:
    """The seconds of a forward pass over a tree."""
    synchronize = session.target.backend.synchronize
    synchronize()
    begun = perf_counter()
    session.verify(tree)
    synchronize()
    return perf_counter() - begun


def curve_file(target: StockModel, batch: int, context: int) -> Path | None:
    """Where a curve is kept, named after a digest of what it depends on. None for models that keep no curves.

    Those are models on several devices, or on one without a name: their speed depends on more.
    """
    model, device = target.model, target.backend.name
    if device is None or has_hooks(model):
        return None
    config = sorted(item for item in target.config.to_dict().items() if item[0] != "_name_or_path")
    settings = config, target.config._attn_implementation, target.dtype
    machine = device, torch.get_num_threads(), torch.get_float32_matmul_precision(), environment()
    versions = transformers.__version__, _digest_package()
    # A model's repr tells packed, quantized and adapted layers apart. Addresses in it change with every start.
    mode = target.compiled, target.has_graphs
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
            file.write_text(json.dumps({"seconds": curve.seconds}))  # half a file is measured again


@cache
def _digest_package() -> str:
    """A digest of this package's source files: any of them may have made passes faster."""
    files = sorted(file for file in PACKAGE.rglob("*") if file.suffix in (".py", ".cpp", ".h"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
