"""A stock model that knows what its forward passes cost."""

from __future__ import annotations

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from decode.models.cost_curve import CONTEXTS, CostCurve, measure_cost_curve, measured_batches, measured_contexts
from decode.models.curve_cache import curve_file, load_curve, save_curve
from decode.models.fixed_cost import fixed_curve, for_batch
from decode.models.stock_model import StockModel


class TimedModel(StockModel):
    """A stock model with its cost curves. deterministic: see `decode.target.Target`."""

    def __init__(self, model: PreTrainedModel, deterministic: bool | CostCurve) -> None:
        super().__init__(model)
        self.deterministic = deterministic
        self._cost_curves: dict[tuple[int, int], CostCurve] = {}  # by batch and context

    def warm_up(self, batch_size: int = 1) -> None:
        """Measure the cost curves of batches of up to `batch_size` rows, which would otherwise delay an answer.

        Nothing is measured twice: curves are kept in the user's cache (`decode.models.curve_cache`).
        """
        if self.deterministic:
            return
        wanted = [(rows, context) for rows in measured_batches(batch_size) for context in measured_contexts(self, rows)]
        missing = [each for each in wanted if each not in self._cost_curves]
        # The bar appears only if this takes longer than a second.
        for each in tqdm(missing, desc="draftless: measuring forward passes", delay=1, leave=False, disable=None):
            self.cost_curve(*each)

    def cost_curve(self, batch_size: int = 1, context: int = CONTEXTS[0]) -> CostCurve:
        """The cost of verifying N nodes relative to one node, after `context` committed tokens.

        Measured now unless `warm_up` has done it or the user's cache has it. Batch sizes are rounded up to powers of
        four, contexts to multiples of 256. Between the measured contexts the seconds are linear, beyond them constant.
        With `deterministic` nothing is measured, and the context does not count.
        """
        if self.deterministic:
            return self._find_fixed_curve(batch_size)
        rows = measured_batches(batch_size)[-1]
        contexts = measured_contexts(self, rows)
        context = min(-(-max(context, 1) // contexts[0]) * contexts[0], contexts[-1])
        key = rows, context
        if key not in self._cost_curves:
            if context in contexts:
                self._cost_curves[key] = self._find_curve(rows, context)
            else:
                share = (context - contexts[0]) / (contexts[1] - contexts[0])
                shortest, longest = (TimedModel.cost_curve(self, rows, each) for each in contexts)
                self._cost_curves[key] = shortest.blend(longest, share)
        return self._cost_curves[key]

    def _find_fixed_curve(self, rows: int) -> CostCurve:
        if (1, 0) not in self._cost_curves:  # no context of a measured one
            self._cost_curves[1, 0] = fixed_curve(self.deterministic, self.device)
        return self._cost_curves.setdefault((rows, 0), for_batch(self._cost_curves[1, 0], rows))

    def _find_curve(self, rows: int, context: int) -> CostCurve:
        """The curve in the user's cache, or one that is measured now and kept there."""
        file = curve_file(self, rows, context)
        curve = load_curve(file)
        if curve is None:
            try:
                curve = measure_cost_curve(self, rows, context)
            except torch.OutOfMemoryError:  # what is decoded may need less
                if rows == 1 and context == CONTEXTS[0]:
                    raise
            else:
                save_curve(file, curve)
        return curve or TimedModel.cost_curve(self, rows if context > CONTEXTS[0] else rows // 4)
