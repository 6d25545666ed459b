"""The output layer of every head: from states to logits over the target's vocabulary or a part of it.

Shapes: K heads, H hidden size, V the target's vocabulary, D draft vocabulary (D = V without a token map).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

Output = Literal["own", "shared", "target"]


@dataclass(frozen=True)
class HeadConfig:
    """What the config of every kind of head has. Facts of the target are None if a published file lacks them."""

    hidden_size: int
    vocab_size: int
    _: KW_ONLY
    draft_size: int | None = None  # tokens of the draft vocabulary; None: the whole vocabulary
    target_layers: int | None = None  # distinguishes targets of the same width
    target_name: str | None = None
    target_weights: str | None = None  # their fingerprint
    max_position_embeddings: int | None = None  # the target's, for servers; no limit here


class VocabularyHead(nn.Module):
    """Base of all heads: the output layer, the draft vocabulary, and token embeddings of its own if its config has any.

    output: "own" is an output matrix [D, H] for each of several heads, `matrices`; "shared" one for all; "target" the
    target's with its bias, which `borrow` sets and the state dict omits. With a draft vocabulary, `token_map` [D]
    holds the target's token ids, ascending. Raises ValueError if `output` or the draft vocabulary is not valid.
    """

    kind: ClassVar[str]  # the name of its `heads.kinds.Kind`
    features: tuple[int, ...] = (-1,)  # the hidden states it reads, in transformers' numbering
    reads_all_features = False  # of a text, to attend to them; else the last committed token's alone
    begins_with_tokens = False  # its states begin as embeddings; else as fused features
    in_float32: tuple[str, ...] = ()  # parts of names of tensors that no format narrower than float32 may hold
    outputs: tuple[Any, ...] = ()  # faster layers in place of those of `output_layer`
    config: Any  # the config class of its kind
    embed_tokens: nn.Embedding | None  # None: the target's
    token_map: Tensor | None
    borrowed: Tensor | None
    borrowed_bias: Tensor | None

    def __init__(self, config: HeadConfig, output: Output, matrices: int = 0, bias: bool = False) -> None:
        super().__init__()
        hidden_size, vocab_size = config.hidden_size, config.vocab_size
        draft_size = config.draft_size or vocab_size
        if output not in ("own", "shared", "target"):
            raise ValueError(f"output is {output!r}; choose own, shared or target")
        if output == "own" and not matrices:
            raise ValueError(f"a head of kind {self.kind} has one output matrix; choose shared or target")
        if not 1 <= draft_size <= vocab_size:
            raise ValueError(f"draft_size is {draft_size}; it must be from 1 to the vocabulary size, {vocab_size}")
        self.config, self.output = config, output
        self.hidden_size, self.target_hidden_size = hidden_size, hidden_size
        self.vocab_size, self.draft_size = vocab_size, draft_size
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size) if getattr(config, "embedding", False) else None
        if output == "own":
            self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, draft_size, bias=bias) for _ in range(matrices))
        elif output == "shared":
            self.lm_head = nn.Linear(hidden_size, draft_size, bias=bias)
        for name in ("borrowed", "borrowed_bias"):
            self.register_buffer(name, None, persistent=False)
        self.register_buffer("token_map", torch.arange(draft_size) if draft_size < vocab_size else None)

    def borrow(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Use the target's output matrix [V, H] and bias [V], or initialize the head's own output layer with them.

        Raises ValueError if the matrix has another shape.
        """
        given, needed = list(weight.shape), [self.vocab_size, self.hidden_size]
        if given != needed:
            raise ValueError(f"the target's output matrix is {given}; this head needs {needed}")
        rows, offsets = self.drafted_rows(weight).detach(), None if bias is None else self.drafted_rows(bias).detach()
        if self.output == "target":
            dtype = next(self.parameters()).dtype if self.borrowed is None else self.borrowed.dtype
            self.borrowed, self.borrowed_bias = rows.to(dtype), None if offsets is None else offsets.to(dtype)
        for linear in self._output_layers():
            linear.weight.data.copy_(rows)
            if linear.bias is not None:
                linear.bias.data.copy_(torch.zeros(()) if offsets is None else offsets)

    def share(self, embeddings: Tensor | None, output: Tensor | None) -> None:
        """Drop the head's own embeddings [V, H] and output matrix [V, H] where they are copies of the target's.

        Copies can have another dtype (`is_copy`). None is for a matrix that cannot be shared. A head that loses its
        output matrix needs `borrow`.
        """
        if self.embed_tokens is not None and is_copy(self.embed_tokens.weight, embeddings):
            self.embed_tokens, self.config = None, replace(self.config, embedding=False)
        if self.output == "shared" and self.lm_head.bias is None and is_copy(self.lm_head.weight, output):
            self.output, self.config = "target", replace(self.config, output="target")
            del self.lm_head

    def drafted_rows(self, weight: Tensor) -> Tensor:
        """The rows [D, ...] of a matrix or bias [V, ...] that belong to the draft vocabulary."""
        return weight if self.token_map is None else weight[self.token_map.to(weight.device)]

    def check_target(self, hidden_size: int, vocab_size: int, layers: int) -> None:
        """Raise ValueError if the head was trained for a target of other sizes."""
        trained = self.config.target_name or "another target"
        for what, own, given in (
            ("hidden size", self.target_hidden_size, hidden_size),
            ("vocabulary size", self.vocab_size, vocab_size),
            ("number of layers", self.config.target_layers, layers),
        ):
            if own is not None and own != given:
                raise ValueError(
                    f"this head was trained for {trained}, whose {what} is {own}; this target's is {given}"
                )
        if self.features[-1] > layers:
            raise ValueError(f"this head reads layer {self.features[-1]}; this target has {layers} layers")

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [B, N, K x F] as the head's layers read them; most heads change nothing."""
        return features

    @property
    def window(self) -> int | None:
        """How many tokens its layers attend to; None: all."""
        layer = getattr(self.config, "layer", None)
        return layer and layer.window

    def output_layer(self, index: int) -> tuple[Tensor, Tensor | None]:
        """The output matrix [D, H] and bias [D] of head `index`. Raises ValueError before `borrow` if it needs it."""
        if layers := self._output_layers():
            linear = layers[index % len(layers)]
            return linear.weight, linear.bias
        if self.borrowed is None:
            raise ValueError("this head uses the target's output matrix; pass it to borrow(weight)")
        return self.borrowed, self.borrowed_bias

    def normalise(self, states: Tensor) -> Tensor:
        """States [..., H] -> the input [..., H] of the output matrix. Most heads need no norm here."""
        return states

    def logits(self, states: Tensor, index: int = 0) -> Tensor:
        """The logits [..., D] of head `index` for its states [..., H]."""
        states = self.normalise(states)
        if self.outputs:
            logits: Tensor = self.outputs[index % len(self.outputs)](states)
            return logits
        return nn.functional.linear(states, *self.output_layer(index))

    def tokens(self, drafted: Tensor) -> Tensor:
        """The target's token ids for ids of the draft vocabulary."""
        return drafted if self.token_map is None else self.token_map[drafted]

    def _output_layers(self) -> list[Any]:
        if self.output == "own":
            return list(self.lm_heads)
        return [self.lm_head] if self.output == "shared" else []


def is_copy(own: Tensor, given: Tensor | None) -> bool:
    """Whether a matrix is equal to a given one in the dtype of either, or in half precision if that holds them."""
    if given is None or given.shape != own.shape or given.is_meta:
        return False
    given = given.to(own.device)
    if torch.equal(own.to(given.dtype), given):
        return True
    exact = (
        dtype for dtype in (own.dtype, torch.bfloat16, torch.float16) if torch.equal(own.to(dtype).to(own.dtype), own)
    )
    return any(torch.equal(own.to(dtype), given.to(dtype)) for dtype in exact)
