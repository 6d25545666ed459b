"""The target: a stock Hugging Face model, and one forward pass of it over a tree.

Shapes: B rows, N nodes, V vocabulary, H hidden size, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.cpu.accelerate import prepared_copy
from decode.cpu.compiled_model import compile_batch, whole_layers
from decode.cpu.linear_kernels import FewOrMany
from decode.masks import layer_reaches
from decode.models.compatibility import refuse_unsupported, self_test, usable_context
from decode.models.cost_curve import Cost, measure_cost
from decode.models.loading import load_model
from decode.session import Session
from decode.text import Tokenizer


class Target:
    """The model whose distribution is kept, ready to verify trees.

    `model`: any decoder-only transformers model (AutoModelForCausalLM) with sdpa or eager attention; it is used as it
    is, never changed. `prepare=True` makes a packed copy of its linear layers for speed on a CPU, at the price of
    that memory, and where it pays has kernels compiled for passes over a few tokens; `compile=True` has them wherever
    they can be, `compile=False` never (see `decode.cpu.accelerate`). Weights that change afterwards reach only parts of such
    copies. Raises ValueError for models that cannot be verified as a tree or, if asked, compiled.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None = None,
        *,
        prepare: bool = False,
        compile: bool | None = None,
    ) -> None:
        refuse_unsupported(model)
        self.model = prepared_copy(model, compile=compile) if prepare or compile else model
        self.tokenizer = tokenizer
        self.config = self.model.config.get_text_config(decoder=True)
        self.reaches = layer_reaches(self.model)
        self.vocabulary = int(self.config.vocab_size)
        self.device = _input_device(self.model)
        self.dtype = self.model.dtype
        self._costs: dict[int, Cost] = {}
        self.self_test_error = self_test(self)

    @classmethod
    def load(cls, name: str | None = None, **options: Any) -> Target:
        """A local folder, a hub id or (without a name) the default model; see `decode.models.loading.load_model`."""
        model, tokenizer = load_model(name, **options)
        return cls(model, tokenizer)

    @property
    def context(self) -> int:
        """The number of positions that prompt and answer may fill."""
        return usable_context(self.config)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer, as the model's generation config lists them."""
        config = self.model.generation_config
        ids = config.eos_token_id if config is not None else None
        return frozenset([ids] if isinstance(ids, int) else ids or ())

    @property
    def compiled(self) -> bool:
        """Whether passes over a few tokens run compiled kernels, of whole decoder layers or of linear layers alone."""
        return bool(whole_layers(self.model)) or any(isinstance(part, FewOrMany) for part in self.model.modules())

    @property
    def output_matrix(self) -> Tensor:
        """The matrix [V, H] that makes logits of the last feature (scaling and caps, where a model has them, aside).

        Raises ValueError where the model hides it.
        """
        output, embeddings = self._output_layer, self.model.get_input_embeddings()
        if hasattr(output, "packed") and not self.config.tie_word_embeddings:
            return output.packed.to_dense().detach()
        matrix = getattr(embeddings if self.config.tie_word_embeddings else output, "weight", None)
        if not isinstance(matrix, Tensor) or matrix.device.type == "meta":
            raise ValueError(f"{type(self.model).__name__} has no dense output matrix that a head could share")
        return matrix.detach()

    @property
    def output_bias(self) -> Tensor | None:
        """What the output layer adds to the logits, [V], in the few models whose output layer has a bias."""
        bias = getattr(self._output_layer, "bias", None)
        return bias.detach() if isinstance(bias, Tensor) else None

    @property
    def _output_layer(self) -> Any:
        """The output layer; of one that is compiled, the form with the dense weight."""
        output = self.model.get_output_embeddings()
        return getattr(output, "few", output)

    def cost(self, batch: int = 1) -> Cost:
        """What verifying N nodes costs at this batch size, beside one; measured when first asked for.

        Sizes between powers of two cost what the next power does.
        """
        bucket = 1 << (batch - 1).bit_length()
        if bucket not in self._costs:
            self._costs[bucket] = measure_cost(self, bucket)
        return self._costs[bucket]

    def open(self, batch: int, layers: Sequence[int] = ()) -> Session:
        """An empty KV cache for `batch` rows. `layers`: whose hidden states to hand out with each verdict."""
        compile_batch(self.model, batch)
        return Session(self, batch, layers)


def _input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids go: to the embeddings, or where accelerate brings them when they are needed."""
    embeddings = model.get_input_embeddings()
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return embeddings.weight.device if device is None else torch.device(device)
