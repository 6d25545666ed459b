"""Hydra heads: like Medusa's, but head i also sees the tokens that were guessed before its own.

After Ankner et al., "Hydra" (2024). Shapes: B rows, T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.decoder_layer import DecoderLayer, LayerConfig
from heads.layer_cache import LayerCache
from heads.layers import GroundedBlock, Norm, ResidualBlock
from heads.vocabulary import Output, VocabularyHead


@dataclass(frozen=True)
class HydraConfig:
    """The shape of a Hydra head. `target_layers` tells targets of one width apart; None where a file does not say."""

    hidden_size: int
    vocab_size: int
    heads: int = 4
    layers: int = 1  # blocks of a head, the grounded one included
    output: Output = "shared"
    draft_size: int | None = None  # None: the whole vocabulary
    output_bias: bool = False
    projected: bool = False  # see GroundedBlock
    target_layers: int | None = None
    target_name: str | None = None
    prefix: LayerConfig | None = None  # Hydra++: see PrefixLayer


class HydraHead(VocabularyHead):
    """K heads in sequence. Head i sees the feature of the last committed token and the embeddings of the i + 1 tokens
    after it, of which the first is chosen already and the others are guesses of the heads before."""

    kind = "hydra"
    features = (-1,)  # the hidden states that it reads, in transformers' numbering
    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        draft_size = config.draft_size or config.vocab_size
        super().__init__(
            config.heads, config.hidden_size, config.vocab_size, draft_size, config.output, config.output_bias
        )
        self.config, self.depth = config, config.heads
        self.grounded = nn.ModuleList(
            GroundedBlock(config.hidden_size, index + 2, config.projected) for index in range(config.heads)
        )
        self.blocks = nn.ModuleList(ResidualBlock(config.hidden_size, config.layers - 1) for _ in range(config.heads))
        self.prefix = None if config.prefix is None else PrefixLayer(config.hidden_size, config.prefix)

    def contextualize(
        self, features: Tensor, cache: LayerCache | None = None, counts: Sequence[int] | None = None
    ) -> Tensor:
        """The features [B, T, H] that the heads read: those of the target, or what the prefix layer makes of them.

        Without a cache the features are a row's first ones, padded at the right. With one they come behind those that
        it holds, and it keeps the first counts[b] of each row (None: all).
        """
        return features if self.prefix is None else self.prefix(features, cache, counts)

    def forward(self, features: Tensor, embedded: Tensor, index: int) -> Tensor:
        """The state [..., H] of head `index` for features [..., H] and the embeddings [..., index + 1, H] behind."""
        states = torch.cat([features, embedded.flatten(-2)], dim=-1)
        return self.blocks[index](self.grounded[index](states))


class PrefixLayer(nn.Module):
    """Hydra++'s look back: a decoder layer over all features so far, that of token i at position i, and a norm."""

    def __init__(self, hidden_size: int, config: LayerConfig) -> None:
        super().__init__()
        self.layer = DecoderLayer(hidden_size, config)
        self.norm = Norm(hidden_size, config.rms_norm_eps)

    def forward(self, features: Tensor, cache: LayerCache | None, counts: Sequence[int] | None) -> Tensor:
        """[B, T, H] -> [B, T, H]; see `HydraHead.contextualize`."""
        batch, tokens = features.shape[:2]
        if cache is None:
            return self.norm(self.layer(features, torch.arange(tokens, device=features.device)[None]))
        states = self.norm(self.layer(features, cache.positions(tokens, features.device), context=cache))
        cache.keep([tokens] * batch if counts is None else counts)
        return states
