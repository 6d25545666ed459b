"""EAGLE heads: decoder layers that predict the target's next feature (EAGLE-1) or a state like it (EAGLE-3).

Sources: Li et al., "EAGLE" (2024), whose weights have the form of EAGLE-2's (Li et al., 2024; another tree) and HASS's
(Zhang et al., 2024; another training); Li et al., "EAGLE-3" (2025), and the variants that speculators, SpecForge and
ModelOpt train. Shapes: B rows, N tokens, H the head's hidden size, F the target's, K layers that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from heads.layer_cache import Attend, attend
from heads.layers import DecoderLayer, LayerConfig, Norm, Positions, make_norm
from heads.vocabulary import HeadConfig, Output, VocabularyHead


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """Sizes of an EAGLE head. `layer.input_norm` is False in every published one: its input is normed already."""

    layer: LayerConfig
    bias: bool = False  # of fc; vLLM ignores it silently
    embedding: bool = False  # its own token embeddings instead of the target's
    output: Output = "target"


class EagleHead(VocabularyHead):
    """Predicts feature f_(i+1) from feature f_i and token t_(i+1), at position i; drafting feeds predictions back.

    Parameters are named as published. A new head repeats its input feature.
    """

    kind = "eagle"
    reads_all_features = True
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, config.output)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([DecoderLayer(config.hidden_size, config.layer)])
        copy_last(self.fc)

    def forward(self, embedded: Tensor, features: Tensor, positions: Positions, attend: Attend = attend) -> Tensor:
        """States [B, N, H]: the input of `logits`, and the features of the next level.

        features: the target's, or earlier states. embedded: the target's embeddings of the token after each.
        """
        return self.layers[0](self.fc(torch.cat([embedded, features], dim=-1)), positions, attend)

    def read(self, embedded: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [B, G, N, D] that `forward` attends with, a small part of its work."""
        layer: Any = self.layers[0]
        states = layer.input_layernorm(self.fc(torch.cat([embedded, features], dim=-1)))
        return layer.self_attn.keys_and_values(states, positions)


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """Sizes and variants of an EAGLE-3 head.

    features: the target's hidden states it reads, in transformers' numbering: L is the output of the first L layers.
    Raises ValueError if the settings contradict each other.
    """

    layer: LayerConfig
    features: tuple[int, ...]
    output: Output = "shared"
    target_hidden_size: int | None = None  # None: the head's own
    embedding: bool = False  # its own token embeddings instead of the target's
    bias: bool = False  # of fc
    fc_norm: bool = False  # a norm for each layer's features ("EAGLE-3.1")
    norm_before_fc: bool = False  # one norm for their concatenation
    norm_before_residual: bool = False  # the residual is the normed state; not in SGLang
    normed_feedback: bool = False  # feed normed states back: `norm_output` of speculators and vLLM
    final_norm: bool = True  # before the output matrix: `norm_output` of SpecForge; servers always have it
    layers: int = 1  # decoder layers; only the first reads tokens

    def __post_init__(self) -> None:
        check_features(self.features)
        if self.layers < 1:
            raise ValueError(f"layers is {self.layers}; an EAGLE-3 head has at least one")
        if self.output == "target" and (self.draft_size or self.vocab_size) < self.vocab_size:
            raise ValueError("a draft vocabulary needs an output matrix of its own, lm_head.weight; choose shared")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc are two ways to norm the features; choose one")
        target_size = self.target_hidden_size or self.hidden_size
        if target_size != self.hidden_size and not self.embedding:
            sizes = f"hidden size is {self.hidden_size} and whose target's is {target_size}"
            raise ValueError(f"a head whose {sizes} needs its own embeddings, embed_tokens.weight")


class Eagle3Head(VocabularyHead):
    """Predicts a state from fused features and the token after them; drafting feeds states back as fused features.

    Parameters are named as published: `midlayer` is the first layer, which some files name `layers.0`; `layers.1` is
    the next. A new head repeats the deepest of its features.
    """

    kind = "eagle3"
    reads_all_features = True
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, config.output)
        size, eps, count = config.hidden_size, config.layer.rms_norm_eps, len(config.features)
        self.features = config.features
        self.target_hidden_size = target_size = config.target_hidden_size or size
        self.fc_norm = nn.ModuleList(make_norm(target_size, eps, config.fc_norm) for _ in range(count))
        self.input_norm = make_norm(count * target_size, eps, config.norm_before_fc)
        self.fc = nn.Linear(count * target_size, size, bias=config.bias)
        self.midlayer = DecoderLayer(size, replace(config.layer, input_norm=True), inputs=2)
        self.midlayer.hidden_norm = Norm(size, eps)
        further = (str(number) for number in range(1, config.layers))
        self.layers = nn.ModuleDict(
            {name: DecoderLayer(size, replace(config.layer, input_norm=True)) for name in further}
        )
        self.norm = make_norm(size, eps, config.final_norm)
        copy_last(self.fc)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [B, N, K x F], lowest layer first -> fused features [B, N, H]."""
        if self.config.fc_norm:
            parts = zip(self.fc_norm, features.chunk(len(self.fc_norm), dim=-1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return self.fc(self.input_norm(features))

    def forward(self, embedded: Tensor, fused: Tensor, positions: Positions, attend: Attend = attend) -> Tensor:
        """States [B, N, H], as in `EagleHead.forward`. fused: fused features, or earlier states.

        embedded: by the head's `embed_tokens` if it has it.
        """
        layer: Any = self.midlayer
        normed = layer.hidden_norm(fused)
        joined = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        states = layer.add(normed if self.config.norm_before_residual else fused, joined, positions, attend)
        for number, further in enumerate(self.layers.values(), start=1):
            states = further(states, positions, partial(attend, layer=number))
        return self.norm(states) if self.config.normed_feedback else states

    def read(self, embedded: Tensor, fused: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `EagleHead.read`, of the first layer."""
        layer: Any = self.midlayer
        joined = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(fused)], dim=-1)
        return layer.self_attn.keys_and_values(joined, positions)

    def normalise(self, states: Tensor) -> Tensor:
        return states if self.config.normed_feedback else self.norm(states)


@dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
    """Sizes of a P-EAGLE head. mask_token: its embedding stands for tokens that are not drafted yet. heads: draft
    tokens of a pass."""

    _: KW_ONLY
    mask_token: int
    heads: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block(self.mask_token, self.vocab_size, heads=self.heads)
        if self.heads == 1:
            raise ValueError("heads is 1; a P-EAGLE head of one draft token is an EAGLE-3 head: choose 2 or more")
        if self.layer.window is not None and self.layer.window < self.heads:
            raise ValueError(
                f"window is {self.layer.window}, and a draft has {self.heads} tokens, which attend to each other: "
                "choose a window of at least as many, or fewer heads"
            )


class PEagleHead(Eagle3Head):
    """An EAGLE-3 head that drafts all tokens in one pass: those after the first from a state and a token that stand for
    the unknown ones (Hui et al., "P-EAGLE", 2026, arXiv 2602.01469)."""

    kind = "peagle"
    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.depth = config.heads
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.weight.shape[1]))

    def unknown(self, count: int) -> tuple[Tensor, Tensor]:
        """The tokens [count] and fused features [count, H] of positions that are not drafted yet."""
        device = self.mask_hidden.device
        tokens = torch.full((count,), self.config.mask_token, device=device)
        return tokens, self.fuse(self.mask_hidden)[0].expand(count, -1)


def check_block(mask_token: int, vocab_size: int, **sizes: int) -> None:
    """Raise ValueError for impossible sizes of a head that drafts in one pass."""
    if not 0 <= mask_token < vocab_size:
        raise ValueError(f"mask_token is {mask_token}; it must be a token of the target, below {vocab_size}")
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; a head that drafts in one pass has at least one")


def check_features(features: Sequence[int]) -> None:
    """Raise ValueError unless these are numbers of hidden states that a head can read."""
    if not features or sorted({*features}) != [*features] or features[0] < 0:
        raise ValueError(f"features is {list(features)}; it must be ascending layer numbers from 0")


def choose_features(layers: int) -> tuple[int, ...]:
    """The default hidden states to read from a target with this many layers: low, middle and high.

    From 7 layers on these are the paper's; below 7 its formula repeats a layer. Fewer than 3 layers are all read.
    """
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return (1, layers // 2, layers - 1) if layers > 3 else tuple(range(1, layers + 1))


def copy_last(linear: nn.Linear) -> None:
    """Initialize a matrix so that it returns the last of its concatenated inputs."""
    size = min(linear.weight.shape)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.zero_()
        linear.weight[:size, -size:] = torch.eye(size)
