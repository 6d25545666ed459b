"""A small draft model in training: cut out of the target, or another checkpoint of the same tokenizer.

Only its decoder layers and its final norm are trained. Embeddings and output matrix are most of a small model's
weights, and those of the target fit its states already. Shapes: B rows, T tokens, R positions, H hidden size.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from decode.models.facts import find_context
from decode.models.stock_model import find_decoder
from training.data import Example
from training.objectives import Objective
from training.teacher import Batch, Teacher, collate

CONFIG, ASIDE = "config.json", ".saving-"


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
        for module in (*filter(lambda each: isinstance(each, nn.Embedding), model.modules()), self._output):
            module.requires_grad_(False)
        weight, bias = self._output.weight.detach(), getattr(self._output, "bias", None)
        bias = None if bias is None else bias.detach()
        self.register_buffer("matrix", weight if tokens is None else weight[tokens], persistent=False)
        self.register_buffer("bias", bias if tokens is None or bias is None else bias[tokens], persistent=False)
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

    @torch.no_grad()
    def roll(self, texts: Sequence[Sequence[int]], count: int, temperature: float) -> list[list[int]]:
        """So many tokens that it samples after each text."""
        device, longest, is_training = self.matrix.device, max(map(len, texts)), self.model.training
        padding = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts], device=device)
        padded = torch.tensor([[0] * (longest - len(text)) + [*text] for text in texts], device=device)
        config = GenerationConfig(
            do_sample=True, temperature=temperature, top_k=0, max_new_tokens=count, pad_token_id=0, eos_token_id=None
        )
        self.model.generation_config, own = config, self.model.generation_config
        self.model.eval()
        try:
            processors = LogitsProcessorList([Drafted(self.token_map)] if self.token_map is not None else [])
            rolled: Any = self.model.generate(padded, attention_mask=padding, logits_processor=processors)
        finally:
            self.model.generation_config = own
            self.model.train(is_training)
        return [row[longest:] for row in rolled.tolist()]

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Save it as a folder of transformers, with its tokenizer. Files are replaced one by one, the config last."""
        model = copy.deepcopy(self.model).to(dtype)
        model.config.target_weights = self.config.target_weights
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{ASIDE}*"):  # of a run that was killed
            shutil.rmtree(left)
        with TemporaryDirectory(dir=folder, prefix=ASIDE) as aside:
            model.save_pretrained(aside)
            self.tokenizer.save_pretrained(aside)
            files = [file.relative_to(aside) for file in Path(aside).rglob("*") if file.is_file()]
            for file in sorted(files, key=lambda file: file.name == CONFIG):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(aside) / file, folder / file)


class Drafted(LogitsProcessor):
    """Leaves the tokens that a draft model drafts."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        kept = torch.full_like(scores, -torch.inf)
        kept[:, self.tokens] = scores[:, self.tokens]
        return kept


class DraftModelObjective(Objective):
    """The loss of a draft model after each token of an answer. In a draft of several tokens, it reads the same way."""

    head: DraftModel

    def draft(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        row, column = batch.answers.nonzero(as_tuple=True)
        yield self.head(batch.tokens)[row, column], row, column


class RolloutLoader:
    """Loads the batch of the examples with the given numbers, each with an end that the draft model has sampled.

    An answer ends at a random place, and from there the draft model goes on for `count` tokens, which the target scores
    too: it learns from its own mistakes (Agarwal et al., "On-policy distillation", 2024). temperature: of its samples.
    """

    def __init__(
        self, examples: Sequence[Example], teacher: Teacher, model: DraftModel, count: int, temperature: float
    ) -> None:
        self.examples, self.teacher, self.model = examples, teacher, model
        self.count, self.temperature = count, temperature
        self._room = min(teacher.target.context, find_context(model.model)) - count

    def __call__(self, numbers: Sequence[int]) -> Batch:
        examples = [self.examples[number] for number in numbers]
        kept = [example.tokens[: self._choose_place(example)] for example in examples]
        made = []
        for example, text, rolled in zip(
            examples, kept, self.model.roll(kept, self.count, self.temperature), strict=True
        ):
            ends = [place for place, token in enumerate(rolled, start=1) if token in self.teacher.target.stop_ids]
            tokens = (*text, *rolled[: min(ends, default=self.count)])
            spans = [(begin, min(end, len(text))) for begin, end in example.spans if begin < len(text)]
            made.append(Example(tokens, (*spans, (len(text), len(tokens)))))
        return collate(made, self.teacher.compute(made))

    def _choose_place(self, example: Example) -> int:
        """A place in an answer, after which the draft model's tokens have room."""
        places = [place for begin, end in example.spans for place in range(begin, end) if place <= self._room]
        return places[int(torch.randint(len(places), ()))] if places else max(1, min(self._room, example.spans[0][0]))
