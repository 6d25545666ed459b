"""Layers that several heads share. Shapes: H hidden size."""

from __future__ import annotations

from torch import Tensor, nn


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its weights; under autocast its input can have a narrower one."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.to(self.weight.dtype))


def make_norm(size: int, eps: float, wanted: bool) -> nn.Module:
    """A `Norm` if `wanted`, else the identity."""
    return Norm(size, eps) if wanted else nn.Identity()


class ResidualBlock(nn.Module):
    """`layers` times x + SiLU(W x + b) (Medusa, section 2.1.1). A new block is the identity: W and b are zero."""

    def __init__(self, hidden_size: int, layers: int, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        for layer in self.layers:
            states = states + nn.functional.silu(layer(states))
        return states


class GroundedBlock(nn.Module):
    """First block of a Hydra head: a concatenation [..., inputs x H] of feature and embeddings -> [..., H].

    projected: the residual connection is a learned matrix, as published; else the feature, with half the parameters.
    """

    def __init__(self, hidden_size: int, inputs: int, projected: bool) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.linear = nn.Linear(inputs * hidden_size, hidden_size)
        self.residual = nn.Linear(inputs * hidden_size, hidden_size) if projected else None
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        if self.residual is not None:
            nn.init.eye_(self.residual.weight)

    def forward(self, states: Tensor) -> Tensor:
        residual = states[..., : self.hidden_size] if self.residual is None else self.residual(states)
        return residual + nn.functional.silu(self.linear(states))
