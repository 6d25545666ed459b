"""EAGLE-1 heads: one decoder layer that predicts the target's next feature from a feature and a token.

Source: Li et al., "EAGLE" (2024). EAGLE-2 (Li et al., 2024) changes only the tree and HASS (Zhang et al., 2024) only
the training, so their weights have this form too. Shapes: B rows, N tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.layer_cache import AttentionContext
from heads.layers import DecoderLayer, LayerConfig, Positions
from heads.vocabulary import HeadConfig, VocabularyHead


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """Sizes of an EAGLE head. `layer.input_norm` is False in every published one: its input is normed already."""

    layer: LayerConfig
    bias: bool = False  # of fc; vLLM ignores it silently


class EagleHead(VocabularyHead):
    """Predicts feature f_(i+1) from feature f_i and token t_(i+1), at position i; drafting feeds predictions back.

    Parameters are named as published. A new head repeats its input feature.
    """

    kind = "eagle"
    reads_all_features = True
    embed_tokens = None  # token embeddings are the target's
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, "target")
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([DecoderLayer(config.hidden_size, config.layer)])
        copy_last(self.fc)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [B, N, H] as `forward` takes them: unchanged."""
        return features

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        positions: Positions,
        mask: Tensor | None = None,
        context: AttentionContext | None = None,
    ) -> Tensor:
        """States [B, N, H]: the input of `logits`, and the features of the next level.

        features: the target's, or earlier states. embedded: the target's embeddings of the token after each.
        """
        return self.layers[0](self.fc(torch.cat([embedded, features], dim=-1)), positions, mask, context)


def copy_last(linear: nn.Linear) -> None:
    """Initialize a matrix so that it returns the last of its concatenated inputs."""
    size = min(linear.weight.shape)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.zero_()
        linear.weight[:size, -size:] = torch.eye(size)
