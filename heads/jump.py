"""Jump heads: a copy of one of the target's middle layers, between two linear maps.

After the cross-layer drafting of economize ("tskip", 2026, Apache-2.0). A linear map estimates the next token's state
below the layer, from the last token's state above it and the next token's embedding. The layer makes the state above of
it, which the next level begins with. Another linear map takes this state to the output matrix, in place of the layers
that are left. The layer attends to the text by the target's own states below it.
Shapes: B rows, N tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heads.formats.decoder_layer import read_layer
from heads.layer_cache import Attend, attend
from heads.layers import DecoderLayer, LayerConfig, Norm, Positions
from heads.vocabulary import HeadConfig, VocabularyHead

PLACE = 0.7  # of the layer, from the first to the last: as in the source
RIDGE = 1e-2  # relative to the mean square of an input
EXACT = 0.05  # relative difference of a copied layer's output, which rounding explains
PARTS = ("q", "k", "v", "o"), ("gate", "up", "down")  # the matrices of attention and of the feed-forward network


@dataclass(frozen=True)
class JumpConfig(HeadConfig):
    """Sizes of a jump head. features: the hidden states below and above the layer, in transformers' numbering."""

    layer: LayerConfig
    features: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.features) != 2 or not 0 <= self.features[0] < self.features[1]:
            raise ValueError(f"features is {[*self.features]}; a jump head reads the states below and above a layer")


class JumpHead(VocabularyHead):
    """Predicts the state above a layer from that of the token before and the token, at the token's position."""

    kind = "jump"
    reads_all_features = True
    config: JumpConfig

    def __init__(self, config: JumpConfig) -> None:
        super().__init__(config, "target")
        size, eps = config.hidden_size, config.layer.rms_norm_eps
        self.features = config.features
        self.enorm, self.hnorm, self.norm = (Norm(size, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size)
        self.layer = DecoderLayer(size, replace(config.layer, input_norm=True))
        self.readout = nn.Linear(size, size)

    def read(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values [B, G, N, D] of a text, from the target's features [B, N, 2 H] at positions."""
        below = features[..., : self.hidden_size]
        return self.layer.self_attn.keys_and_values(self.layer.input_layernorm(below), positions)

    def above(self, features: Tensor) -> Tensor:
        """The states [..., H] above the layer, from the target's features [..., 2 H]."""
        return features[..., self.hidden_size :]

    def forward(self, embedded: Tensor, states: Tensor, positions: Positions, attend: Attend = attend) -> Tensor:
        """States [B, N, H]: the input of `logits`, and the states of the next level.

        states: above the layer, of the tokens before these. embedded: the target's embeddings of these.
        """
        return self.layer(self.eh_proj(self.join(embedded, states)), positions, attend)

    def join(self, embedded: Tensor, states: Tensor) -> Tensor:
        """What the estimate of the state below [..., H] is made of: [..., 2 H]."""
        return torch.cat([self.enorm(embedded), self.hnorm(states)], dim=-1)

    def normalise(self, states: Tensor) -> Tensor:
        return self.readout(self.norm(states))

    @torch.no_grad()
    def fit(self, embedded: Tensor, features: Tensor, last: Tensor) -> None:
        """Set both linear maps by least squares, on some tokens and the ones before.

        embedded: [N, H], of the tokens. features: [2, N, 2 H], of the tokens before and of these. last: [N, H], the
        target's last states of these tokens.
        """
        before, own = features
        below, above = own.split(self.hidden_size, dim=-1)
        _fit_linear(self.eh_proj, self.join(embedded, self.above(before)), below)
        _fit_linear(self.readout, self.norm(above), last)


class LayerCopy(NamedTuple):
    """A layer of the target, as a head's `DecoderLayer` has it."""

    config: LayerConfig
    tensors: dict[str, Tensor]


def choose_jump(layers: int) -> tuple[int, int]:
    """The default hidden states to read from a target with this many layers."""
    above = min(max(1, round(PLACE * layers)), max(1, layers - 1))
    return above - 1, above


@torch.no_grad()
def copy_layer(layer: Any, config: Mapping[str, Any], below: Tensor, above: Tensor) -> LayerCopy | None:
    """A decoder layer of transformers as ours; None if it computes something else.

    config: of its model. below, above: the states [1, N, H] of a text before and after it.
    """
    try:
        tensors, every = _read_tensors(layer, below), config.get("sliding_window")
        window = getattr(layer.self_attn, "sliding_window", None if config.get("layer_types") else every)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        sizes = replace(read_layer(shapes, "", config), window=window)
        below, above = below[:, :window], above[:, :window]  # these tokens see all before them
        own = DecoderLayer(below.shape[2], sizes).to(below)
        own.load_state_dict(tensors)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, RuntimeError, ValueError):  # it has other parts or shapes, or settings that ours has not
        return None
    found = own(below, torch.arange(below.shape[1], device=below.device)[None])
    change = (above - below).float().norm()
    return LayerCopy(sizes, tensors) if (found - above).float().norm() <= EXACT * change else None


def _read_tensors(layer: Any, like: Tensor) -> dict[str, Tensor]:
    """The weights of a layer, which may be packed, by our names."""
    tensors: dict[str, Tensor] = {}
    for part, names in zip(("self_attn", "mlp"), PARTS, strict=True):
        for name in names:
            matrix: Any = layer.get_submodule(f"{part}.{name}_proj")
            weight = matrix.dense_weight() if hasattr(matrix, "dense_weight") else matrix.weight
            tensors[f"{part}.{name}_proj.weight"] = weight.detach().to(like)
            if matrix.bias is not None:
                tensors[f"{part}.{name}_proj.bias"] = matrix.bias.detach().to(like)
    for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
        if hasattr(layer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]):
            tensors[f"{name}.weight"] = layer.get_submodule(name).weight.detach().to(like)
    return tensors


def _fit_linear(linear: nn.Linear, inputs: Tensor, outputs: Tensor) -> None:
    """Least squares for inputs [N, I] and outputs [N, O], with a ridge."""
    inputs, outputs = inputs.double(), outputs.double()
    means = inputs.mean(dim=0), outputs.mean(dim=0)
    inputs, outputs = inputs - means[0], outputs - means[1]
    square = inputs.T @ inputs
    square.diagonal().add_(RIDGE * square.diagonal().mean())
    weight = torch.linalg.solve(square, inputs.T @ outputs).T
    linear.weight.copy_(weight)
    linear.bias.copy_(means[1] - weight @ means[0])
