"""A small draft model in training: cut out of the target, or another checkpoint of the same tokenizer.

Only its decoder layers and its final norm are trained. Embeddings and output matrix are most of a small model's
weights, and those of the target fit its states already. Shapes: B rows, T tokens, R positions, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.models.stock_model import find_decoder
from heads.atomic_write import replace_files
from training.objectives import Objective
from training.teacher import Batch


@dataclass(frozen=True)
class DraftModelConfig:
    """Where a draft model comes from. layers: those of the model that it was cut out of; None: it is whole."""

    source: str
    layers: tuple[int, ...] | None = None
    draft_size: int | None = None
    target_weights: str | None = None


class DraftModel(nn.Module):
    """A draft model, as the trainer sees it: a head that reads tokens and no features.

    model: as it was loaded (`accelerate="off"`). tokens [D]: the target's tokens that it drafts; None: all.

    Raises ValueError for a model whose logits are no product of its states with a matrix, for example because they are
    capped: losses are computed from such products.
    """

    kind = "draft"
    features = ()
    token_map: Tensor | None
    matrix: Tensor
    bias: Tensor | None

    def __init__(self, model: PreTrainedModel, tokenizer: Any, config: DraftModelConfig, tokens: Tensor | None) -> None:
        super().__init__()
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.vocab_size = int(self._text_config.vocab_size)
        self.draft_size = self.vocab_size if tokens is None else len(tokens)
        self.register_buffer("token_map", tokens, persistent=False)
        decoder = find_decoder(model)[0]
        model.requires_grad_(False)
        decoder.requires_grad_(True)
        for module in (*filter(lambda each: isinstance(each, nn.Embedding), decoder.modules()), self._output):
            module.requires_grad_(False)
        weight, bias = self._output.weight.detach(), getattr(self._output, "bias", None)
        bias = None if bias is None else bias.detach()
        self.register_buffer("matrix", weight if tokens is None else weight[tokens], persistent=False)
        self.register_buffer("bias", bias if tokens is None or bias is None else bias[tokens], persistent=False)
        self.train()
        self._scale = self._find_scale()
        if tokens is not None:  # `load_draft_model` reads them; other programs draft from the whole vocabulary
            self._text_config.draft_tokens = tokens.tolist()
        elif hasattr(self._text_config, "draft_tokens"):
            del self._text_config.draft_tokens

    @property
    def _output(self) -> Any:
        return self.model.get_output_embeddings()

    @property
    def _text_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @torch.no_grad()
    def _find_scale(self) -> float:
        """The factor of the logits: 1 in most models."""
        tokens = torch.arange(min(16, self.vocab_size), device=self.matrix.device)[None]
        logits, product = self.model(input_ids=tokens, use_cache=False).logits, self._output(self(tokens))
        scale = float((logits * product).sum() / (product * product).sum())
        if not torch.allclose(logits, scale * product, rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
            kind = self.model.config.model_type
            raise ValueError(f"{kind} does more to its logits than a matrix product, so it cannot be trained here")
        return scale

    def train(self, mode: bool = True) -> Self:
        """It stays in evaluation mode, without dropout: it is resumed and validated as it is trained."""
        return super().train(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The states [B, T, H] after tokens [B, T], which may be padded at their ends."""
        states: Tensor = find_decoder(self.model)[0](input_ids=tokens, use_cache=False)[0]
        return states

    def output_layer(self, index: int) -> tuple[Tensor, Tensor | None]:
        """As of a head."""
        return self.matrix, self.bias

    def normalise(self, states: Tensor) -> Tensor:
        """As of a head."""
        return states * self._scale

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Save it as a folder of transformers, with its tokenizer. Files are replaced one by one, the config last."""
        model = copy.deepcopy(self.model).to(dtype)
        model.config.target_weights = self.config.target_weights

        def write(aside: Path) -> None:
            model.save_pretrained(aside)
            self.tokenizer.save_pretrained(aside)

        replace_files(folder, write, last="config.json")


class DraftModelObjective(Objective):
    """The loss of a draft model after each token of an answer. In a draft of several tokens, it reads the same way."""

    head: DraftModel
    reads_tokens = False

    def draft(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        row, column = batch.answers.nonzero(as_tuple=True)
        yield self.head(batch.tokens)[row, column], row, column
