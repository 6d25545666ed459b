"""The target: the stock model whose distribution is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from decode.cpu.acceleration import accelerated_copy, dense_output_layer, is_compiled
from decode.cpu.compiled_model import compile_batch
from decode.models.compatibility import refuse_unsupported, unwrap
from decode.models.cost_curve import CostCurve, measure_cost_curve
from decode.models.loading import load_model
from decode.models.self_test import self_test
from decode.models.stock_model import StockModel
from decode.session import Session
from decode.text import Tokenizer


class Target(StockModel):
    """The model whose distribution is kept, ready to verify trees.

    model: any decoder-only transformers model with sdpa or eager attention. It is never changed.
    accelerate: "off" uses the model as it is; "packed", "compiled" and "auto" use an accelerated copy
    (`decode.cpu.acceleration`), in which later changes of the weights take effect only in part.

    Raises ValueError for a model that cannot verify a tree, or that `accelerate="compiled"` cannot compile.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer | None = None, *, accelerate: str = "off") -> None:
        model = unwrap(model)
        refuse_unsupported(model)
        super().__init__(accelerated_copy(model, accelerate))
        self.tokenizer = tokenizer
        self._cost_curves: dict[int, CostCurve] = {}
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
    ) -> Self:
        """Load a target from a local folder or a hub id; without a name, the default model.

        Arguments and errors are those of `decode.models.loading.load_model`.
        """
        return cls(*load_model(name, dtype=dtype, device=device, device_map=device_map, accelerate=accelerate))

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
    def output_matrix(self) -> Tensor:
        """The output layer's matrix [V, H].

        Raises ValueError if the model has no dense one.
        """
        output, embeddings = dense_output_layer(self.model), self.model.get_input_embeddings()
        if hasattr(output, "packed") and not self.config.tie_word_embeddings:
            return output.packed.to_dense().detach()
        matrix = getattr(embeddings if self.config.tie_word_embeddings else output, "weight", None)
        if not isinstance(matrix, Tensor) or matrix.device.type == "meta":
            raise ValueError(f"{type(self.model).__name__} has no dense output matrix that a head could share")
        return matrix.detach()

    @property
    def output_bias(self) -> Tensor | None:
        """The output layer's bias [V]; None in most models."""
        bias = getattr(dense_output_layer(self.model), "bias", None)
        return bias.detach() if isinstance(bias, Tensor) else None

    def warm_up(self, batch_size: int = 1, *, measure: bool = True) -> None:
        """Do what would otherwise delay an answer: compile kernels and, with `measure`, measure the cost curves.

        Covers batches of up to `batch_size` rows. Nothing is done twice.
        """
        compile_batch(self.model, batch_size)
        missing = [rows for rows in _buckets(batch_size) if rows not in self._cost_curves] if measure else []
        # The bar appears only if this takes longer than a second.
        for rows in tqdm(missing, desc="draftless: measuring forward passes", delay=1, leave=False, disable=None):
            self.cost_curve(rows)

    def cost_curve(self, batch_size: int = 1) -> CostCurve:
        """The cost of verifying N nodes relative to one node. Measured now unless `warm_up` has done it.

        A batch size that is no power of two gets the curve of the next power.
        """
        rows = _buckets(batch_size)[-1]
        if rows not in self._cost_curves:
            self._cost_curves[rows] = measure_cost_curve(self, rows)
        return self._cost_curves[rows]

    def open(self, batch_size: int, layers: Sequence[int] = ()) -> Session:
        """An empty KV cache for `batch_size` rows. layers: the hidden states that a verdict carries as features."""
        return Session(self, batch_size, layers)


def _buckets(batch_size: int) -> list[int]:
    """The powers of two up to the first that is at least `batch_size`."""
    return [1 << exponent for exponent in range((batch_size - 1).bit_length() + 1)]
