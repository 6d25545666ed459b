"""What DFlash2 adds to a block head: a pair score that depends on the row's state, and convolutions along the block.

Source: z-lab/dflash, dflash/model.py (2026). Shapes: B rows, R rows of a block, H hidden size, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from heads.layer_cache import Attend, attend
from heads.layers import DecoderLayer, LayerConfig, Positions


class Selector(nn.Module):
    """What the logits of a row's most likely tokens get for the token before them and for the row's state."""

    def __init__(self, vocab_size: int, draft_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(draft_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, states: Tensor, tokens: Tensor, candidates: Tensor) -> Tensor:
        """Normed states [..., H] of rows, the tokens [...] before theirs, and draft ids [..., C] -> scores [..., C]."""
        read = self.predecessor_codebook[tokens] * self.hidden_projection(states)
        return (read[..., None, :] * self.successor_codebook[candidates]).sum(dim=-1)


class LocalConvolution(nn.Module):
    """A convolution of a sublayer's input along a block's rows, and one of its output. A new one is the identity.

    The kernel of a row reaches `taps` rows, its own and those before it. It is a learned one for each channel, plus one
    for each `group` of channels that is computed from the sublayer's input.
    """

    def __init__(self, size: int, rows: int, taps: int, group: int) -> None:
        super().__init__()
        self.rows, self.group = rows, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)
        nn.init.ones_(self.base_kernel.data[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, states: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The convolved input [B, blocks x R, H] of a sublayer, and the function that convolves its output."""
        dynamic = self.kernel_projection(states).unflatten(-1, (2, self.base_kernel.shape[1], -1, 1))
        before, after = (
            partial(self._convolve, base, each)
            for base, each in zip(self.base_kernel, dynamic.unbind(dim=2), strict=True)
        )
        return before(states), after

    def _convolve(self, base: Tensor, dynamic: Tensor, states: Tensor) -> Tensor:
        """base [taps, H], dynamic [B, blocks x R, taps, groups, 1]. A block's first row has none before it."""
        blocks = states.unflatten(1, (-1, self.rows))
        result = torch.zeros_like(states)
        for tap in range(len(base)):
            shifted = nn.functional.pad(blocks, (0, 0, tap, 0))[:, :, : self.rows].flatten(1, 2)
            kernel = base[tap].unflatten(-1, (-1, self.group)) + dynamic[:, :, tap]
            result = result + (kernel * shifted.unflatten(-1, (-1, self.group))).flatten(-2)
        return result


class LocalLayer(DecoderLayer):
    """A decoder layer with convolutions around attention and around the feed-forward network."""

    def __init__(self, size: int, config: LayerConfig, rows: int, taps: int, group: int) -> None:
        super().__init__(size, config)
        self.attention_conv, self.mlp_conv = (LocalConvolution(size, rows, taps, group) for _ in range(2))

    def forward(self, states: Tensor, positions: Positions, attend: Attend = attend) -> Tensor:
        inputs, convolve = self.attention_conv(self.input_layernorm(states))
        mixed = attend(*self.self_attn.project(inputs, positions))
        states = states + convolve(self.self_attn.o_proj(mixed.transpose(1, 2).flatten(-2)))
        inputs, convolve = self.mlp_conv(self.post_attention_layernorm(states))
        return states + convolve(self.mlp(inputs))
