"""EAGLE heads: one decoder layer that goes on with the target's last hidden states, a token ahead of them.

After Li et al., "EAGLE" (2024); EAGLE-2 (Li et al., 2024) changes the tree alone and HASS (Zhang et al., 2024) the
training alone, so their weights are these too. Shapes: B rows, N tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.decoder_layer import DecoderLayer, LayerConfig
from heads.layer_cache import Context
from heads.vocabulary import VocabularyHead


@dataclass(frozen=True)
class EagleConfig:
    """The shape of an EAGLE head. `target_layers` tells targets of one width apart; None where a file does not say.

    `layer.input_norm` is False in every published head: the feature is normed already.
    """

    hidden_size: int
    vocab_size: int
    layer: LayerConfig
    draft_size: int | None = None  # None: the whole vocabulary
    bias: bool = False  # of fc; vLLM would drop it without a word
    max_position_embeddings: int | None = None  # the target's, which servers want to be told; no limit here
    target_layers: int | None = None
    target_name: str | None = None


class EagleHead(VocabularyHead):
    """From the pair of feature f_i and token t_(i+1), at position i, the feature f_(i+1), which the target's own output
    matrix reads. It was trained on true features and drafts with its own.

    Parameters are named as published. A new head says each feature again.
    """

    kind = "eagle"
    features = (-1,)  # the hidden states that it reads, in transformers' numbering
    embed_tokens = None  # its tokens' embeddings are the target's
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        draft_size = config.draft_size or config.vocab_size
        super().__init__(1, config.hidden_size, config.vocab_size, draft_size, "target")
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([DecoderLayer(config.hidden_size, config.layer)])
        copy_last(self.fc)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [B, N, H] as the head reads them: as they are."""
        return features

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """The states [B, N, H] that `logits` reads, and that are the features of the next level.

        embedded: the target's embeddings [B, N, H] of the tokens after the features [B, N, H], which are the target's
        or an earlier call's states. positions [B, N] or [1, N], mask and context: see `DecoderLayer.forward`.
        """
        return self.layers[0](self.fc(torch.cat([embedded, features], dim=-1)), positions, mask, context)


def copy_last(linear: nn.Linear) -> None:
    """Let a matrix of many inputs side by side pass on the last of them, as far as it goes."""
    out_features, in_features = linear.weight.shape
    kept = min(out_features, in_features)
    with torch.no_grad():
        linear.weight.zero_()
        linear.weight[:kept, in_features - kept :] = torch.eye(kept)
        if linear.bias is not None:
            linear.bias.zero_()
