"""What heads are built of."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Norm(nn.RMSNorm):
    """RMSNorm in the number format of its weights. Under autocast, states come in a narrower one."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.to(self.weight.dtype))


class ResidualBlock(nn.Module):
    """`layers` times x + SiLU(W x + b), W and b zero at first, so that a new block changes nothing (Medusa, 2.1.1)."""

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
    """The first block of a Hydra head: many tensors [..., H] side by side, [..., n x H], become one [..., H].

    projected: the way past the nonlinearity is a matrix of its own, as published (Hydra's `res_connection`);
    otherwise it is the first of the tensors, the feature, which saves half of the block.
    """

    def __init__(self, hidden_size: int, inputs: int, projected: bool) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.linear = nn.Linear(inputs * hidden_size, hidden_size)
        self.residual = nn.Linear(inputs * hidden_size, hidden_size) if projected else None
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        if self.residual is not None:
            nn.init.zeros_(self.residual.bias)
            with torch.no_grad():
                self.residual.weight.copy_(torch.eye(hidden_size, inputs * hidden_size))

    def forward(self, states: Tensor) -> Tensor:
        past = states[..., : self.hidden_size] if self.residual is None else self.residual(states)
        return past + nn.functional.silu(self.linear(states))
