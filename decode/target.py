"""The target: the stock model whose distribution is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from decode.cpu.acceleration import accelerated_copy, is_compiled
from decode.cpu.grouped_attention import ATTENTION
from decode.models.compatibility import refuse_unsupported, unwrap
from decode.models.cost_curve import CONTEXTS, CostCurve, measure_cost_curve, measured_batches, measured_contexts
from decode.models.curve_cache import curve_file, load_curve, save_curve
from decode.models.fixed_cost import fixed_curve, for_batch
from decode.models.loading import load_model
from decode.models.self_test import self_test
from decode.models.stock_model import StockModel
from decode.session import Session
from decode.text import Tokenizer


class Target(StockModel):
    """The model whose distribution is kept, ready to verify trees.

    model: any decoder-only transformers model with sdpa, eager or flex attention. It is never changed.
    accelerate: "off" uses the model as it is; "packed", "compiled" and "auto" use an accelerated copy
    (`decode.cpu.acceleration`), in which later changes of the weights take effect only in part.
    deterministic: the sizes of draft trees do not depend on this run's clock. Nothing is measured; True takes a fixed
    cost curve, a `CostCurve` that curve, for example `cost_curve()` of an earlier run. In a `torch.distributed` group
    the first rank's counts, and all ranks must decode the same prompts.

    Raises ValueError for a model that cannot verify a tree, or that `accelerate="compiled"` cannot compile.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None = None,
        *,
        accelerate: str = "off",
        deterministic: bool | CostCurve = False,
    ) -> None:
        model = unwrap(model)
        refuse_unsupported(model)
        super().__init__(accelerated_copy(model, accelerate))
        self.tokenizer = tokenizer
        self.deterministic = deterministic
        self._cost_curves: dict[tuple[int, int], CostCurve] = {}  # by batch and context
        self_test(self)

    @classmethod
    def load(
        cls,
        name: str | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        device_map: str | None = None,
        accelerate: str = "auto",
        deterministic: bool | CostCurve = False,
    ) -> Self:
        """Load a target from a local folder or a hub id; without a name, the default model.

        Arguments and errors are those of `decode.models.loading.load_model`, and of this class.
        """
        loaded = load_model(name, dtype=dtype, device=device, device_map=device_map, accelerate=accelerate)
        return cls(*loaded, deterministic=deterministic)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer, from the model's generation config."""
        config = self.model.generation_config
        ids = config.eos_token_id if config is not None else None
        return frozenset([ids] if isinstance(ids, int) else ids or ())

    @property
    def compiled(self) -> bool:
        """Whether passes over a few tokens run compiled kernels."""
        return is_compiled(self.model)

    @property
    def needs_masks(self) -> bool:
        return self.compiled or (self.device.type == "cpu" and self.model.config._attn_implementation == ATTENTION)

    @property
    def output_matrix(self) -> Tensor:
        """The output layer's matrix [V, H].

        Raises ValueError if the model has no dense one.
        """
        output, embeddings = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if hasattr(output, "dense_weight") and not self.config.tie_word_embeddings:
            return output.dense_weight()
        matrix = getattr(embeddings if self.config.tie_word_embeddings else output, "weight", None)
        if not isinstance(matrix, Tensor) or matrix.device.type == "meta":
            raise ValueError(f"{type(self.model).__name__} has no dense output matrix that a head could share")
        return matrix.detach()

    @property
    def output_bias(self) -> Tensor | None:
        """The output layer's bias [V]; None in most models."""
        bias = getattr(self.model.get_output_embeddings(), "bias", None)
        return bias.detach() if isinstance(bias, Tensor) else None

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
                shortest, longest = (self.cost_curve(rows, each) for each in contexts)
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
        return curve or self.cost_curve(rows if context > CONTEXTS[0] else rows // 4)

    def open(self, batch_size: int, layers: Sequence[int] = ()) -> Session:
        """An empty KV cache for `batch_size` rows. layers: the hidden states that a verdict carries as features."""
        return Session(self, batch_size, layers)
