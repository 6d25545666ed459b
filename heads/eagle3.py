"""EAGLE-3 heads: one decoder layer over the target's hidden states of several depths, and a vocabulary of its own.

After Li et al., "EAGLE-3" (2025), and the variants of it that speculators, SpecForge and ModelOpt train.
Shapes: B rows, N tokens, H hidden size of the head, F of the target, K layers that are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.decoder_layer import Attention, FeedForward, LayerConfig
from heads.eagle import copy_last
from heads.layer_cache import Context
from heads.layers import Norm
from heads.vocabulary import Output, VocabularyHead


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of an EAGLE-3 head; what is False by default is what a variant adds.

    features: the target's hidden states that it reads, in transformers' numbering, in which L is the output of the
    first L layers (see `choose_features`). Raises ValueError where the parts do not go together.
    """

    hidden_size: int
    vocab_size: int
    layer: LayerConfig
    features: tuple[int, ...]
    draft_size: int | None = None  # None: the whole vocabulary
    output: Output = "shared"
    target_hidden_size: int | None = None  # None: the head's own
    embedding: bool = False  # embeddings of its own, not the target's
    bias: bool = False  # of fc
    fc_norm: bool = False  # a norm for each layer's features ("EAGLE-3.1")
    norm_before_fc: bool = False  # a norm for all of them side by side
    norm_before_residual: bool = False  # go on from the normed states; SGLang cannot
    normed_feedback: bool = False  # feed back what the output matrix reads: `norm_output` of speculators and vLLM
    final_norm: bool = True  # before the output matrix: `norm_output` of SpecForge; servers always have it
    max_position_embeddings: int | None = None  # the target's, which servers want to be told; no limit here
    target_layers: int | None = None
    target_name: str | None = None

    def __post_init__(self) -> None:
        if not self.features or sorted({*self.features}) != [*self.features] or self.features[0] < 0:
            raise ValueError(f"the layers that are read are {list(self.features)}; they must be ascending, from 0")
        if self.output == "own":
            raise ValueError("an EAGLE-3 head has one output matrix; choose shared or target")
        if self.output == "target" and (self.draft_size or self.vocab_size) < self.vocab_size:
            raise ValueError("an EAGLE-3 head with a vocabulary of its own needs an output matrix of its own")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc are two ways to norm the features; choose one")
        if (self.target_hidden_size or self.hidden_size) != self.hidden_size and not self.embedding:
            raise ValueError("a head of another hidden size than the target's needs embeddings of its own")


class Eagle3Head(VocabularyHead):
    """From fused features and the token after them, a state that guesses the next token and is fed back as it is.

    Parameters are named as published. A new head says again what the deepest of its features says to the output matrix.
    """

    kind = "eagle3"
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        size, eps, count = config.hidden_size, config.layer.rms_norm_eps, len(config.features)
        super().__init__(1, size, config.vocab_size, config.draft_size or config.vocab_size, config.output)
        self.config, self.features = config, config.features
        self.target_hidden_size = config.target_hidden_size or size
        wide = count * self.target_hidden_size
        self.fc_norm = nn.ModuleList(
            Norm(self.target_hidden_size, eps) if config.fc_norm else nn.Identity() for _ in range(count)
        )
        self.input_norm = Norm(wide, eps) if config.norm_before_fc else nn.Identity()
        self.fc = nn.Linear(wide, size, bias=config.bias)
        self.midlayer = JoiningLayer(size, config.layer, config.norm_before_residual)
        self.norm = Norm(size, eps) if config.final_norm else nn.Identity()
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.embedding else None
        copy_last(self.fc)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [B, N, K x F], lowest layer first, as the head reads them: [B, N, H]."""
        parts = features.unflatten(-1, (len(self.fc_norm), -1)).unbind(-2)
        normed = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(self.input_norm(normed))

    def forward(
        self,
        embedded: Tensor,
        fused: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """The states [B, N, H] that `logits` reads, and that take the place of fused features in the next level.

        embedded: embeddings [B, N, H] of the tokens after the fused features [B, N, H], by `embed_tokens` where the
        head has them and else the target's. positions [B, N] or [1, N], mask and context: see `DecoderLayer.forward`.
        """
        states = self.midlayer(embedded, fused, positions, mask, context)
        return self.norm(states) if self.config.normed_feedback else states

    def normalise(self, states: Tensor) -> Tensor:
        return states if self.config.normed_feedback else self.norm(states)

    def check_target(self, hidden_size: int, vocab_size: int, layers: int) -> None:
        super().check_target(hidden_size, vocab_size, layers)
        if self.features[-1] > layers:
            raise ValueError(f"this head reads layer {self.features[-1]}; this target has {layers} layers")


class JoiningLayer(nn.Module):
    """A decoder layer whose attention reads embeddings and states side by side, each with a norm of its own."""

    def __init__(self, hidden_size: int, config: LayerConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            Norm(hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn = Attention(hidden_size, config, inputs=2)
        self.mlp = FeedForward(hidden_size, config.intermediate_size)

    def forward(
        self, embedded: Tensor, states: Tensor, positions: Tensor, mask: Tensor | None, context: Context | None
    ) -> Tensor:
        """Embeddings and states [B, N, H] each -> [B, N, H]; see `DecoderLayer.forward`."""
        normed = self.hidden_norm(states)
        joined = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        past = normed if self.norm_before_residual else states
        states = past + self.self_attn(joined, positions, mask, context)
        return states + self.mlp(self.post_attention_layernorm(states))


def choose_features(layers: int) -> tuple[int, ...]:
    """The hidden states to read of a target of so many layers: low, middle and high, in transformers' numbering.

    Those of the paper's code from 7 layers on; in fewer it would read one twice. Below 3 there are not three.
    """
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return (1, layers // 2, layers - 1) if layers > 3 else tuple(range(1, layers + 1))
