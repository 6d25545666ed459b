"""Block heads: a few decoder layers that draft a whole block of tokens in one pass.

Sources: Chen et al., "DFlash" (2026, arXiv 2602.06036), whose layers attend to the target's features and to the block;
the pair score is the Markov head of "DSpark" (2026), or the selector of DFlash2, whose layers have convolutions too
(z-lab/dflash, dflash/model.py). Shapes: B rows, N tokens, L draft tokens, R rows of a block, H the head's hidden size,
F the target's, K layers that are read, G key-value heads of a layer, D draft vocabulary, P rank of the pair score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from heads.eagle import check_block, check_features, copy_last
from heads.layer_cache import Attend, attend
from heads.layers import DecoderLayer, LayerConfig, Norm, Positions
from heads.vocabulary import HeadConfig, Output, VocabularyHead


@dataclass(frozen=True)
class DFlashConfig(HeadConfig):
    """Sizes of a block head.

    features: as for EAGLE-3. mask_token: the token whose embedding stands for those that are not drafted yet. heads:
    draft tokens of a block. pair_rank: of the score of a token after the one before it; 0: none, so all paths have the
    same next tokens. from_anchor: whether the row of the last known token drafts too, as in DSpark; DFlash's first
    draft token comes from the row after it. causal: rows of a block attend to no later ones, as in JetSpec and in most
    published heads with a window. full_layers: those that attend to everything, whatever the window and `causal` are.

    DFlash2 has two more. candidates: tokens of each row that the pair score, which depends on the row's state then,
    chooses among; 0: all, as in DSpark. taps, group: rows that a layer's convolutions see, and channels that share a
    dynamic kernel; 0: no convolutions.
    """

    layer: LayerConfig
    features: tuple[int, ...]
    mask_token: int
    output: Output = "target"
    heads: int = 6
    layers: int = 2
    pair_rank: int = 64
    from_anchor: bool = True
    causal: bool = False
    full_layers: tuple[int, ...] = ()
    candidates: int = 0
    taps: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        check_features(self.features)
        check_block(self.mask_token, self.vocab_size, heads=self.heads, layers=self.layers)
        if self.output == "own":
            raise ValueError("a block head has one output matrix; choose shared or target")
        if self.full_layers and (self.layer.window is None or not {*self.full_layers} < {*range(self.layers)}):
            raise ValueError(
                f"full_layers is {list(self.full_layers)}; it is for heads with a window in some of their layers, of "
                f"which this one has {self.layers}"
            )

        if bool(self.candidates) != bool(self.taps) or (self.candidates and not (self.pair_rank and self.group)):
            raise ValueError(
                "DFlash2 has candidates, a pair_rank, taps and a group; set all of them, or none but the rank"
            )
        if self.taps and self.hidden_size % self.group:
            raise ValueError(f"group is {self.group}; it must divide the hidden size, {self.hidden_size}")

    def find_sight(self, layer: int) -> tuple[int | None, bool]:
        """The window of a layer, and whether rows of a block attend to no later ones in it."""
        return (None, False) if layer in self.full_layers else (self.layer.window, self.causal)


class PairScores(nn.Module):
    """What the logits of a token get for the token before it: a product of low rank (DSpark's Markov head).

    A new one is zero: tokens do not depend on each other.
    """

    def __init__(self, vocab_size: int, draft_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def read(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Tokens [...] -> [..., P]: the input of `score`. states: not read."""
        return self.markov_w1(tokens)

    def score(self, read: Tensor) -> Tensor:
        """The scores [..., D] of all tokens after those that were read [..., P]."""
        return self.markov_w2(read)

    @property
    def matrix(self) -> Tensor:
        """What `score` multiplies with, [D, P]."""
        return self.markov_w2.weight


class Selector(nn.Module):
    """DFlash2's pair score, which depends on the row's state. It chooses among the row's most likely tokens only.

    A new one is zero.
    """

    def __init__(self, vocab_size: int, draft_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(draft_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def read(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Normed states [..., H] of rows and the tokens [...] before theirs -> [..., P]."""
        return self.predecessor_codebook[tokens] * self.hidden_projection(states)

    def score(self, read: Tensor, candidates: Tensor) -> Tensor:
        """The scores [..., C] of some tokens, by their draft ids [..., C]."""
        return (read[..., None, :] * self.successor_codebook[candidates]).sum(dim=-1)

    @property
    def matrix(self) -> Tensor:
        """As of `PairScores`."""
        return self.successor_codebook


class LocalConvolution(nn.Module):
    """A convolution of a sublayer's input along a block's rows, and one of its output. A new one is the identity.

    The kernels of a row, which see it and the rows before it, are the sum of learned ones and of dynamic ones, which
    are computed from the row's input.
    """

    def __init__(self, size: int, rows: int, taps: int, group: int) -> None:
        super().__init__()
        self.rows, self.group = rows, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * size // group, bias=False)
        nn.init.ones_(self.base_kernel.data[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, states: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The convolved input [B, blocks x R, H] of a sublayer, and the function that convolves its output."""
        dynamic = self.kernel_projection(states).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        before, after = (self.base_kernel + dynamic.repeat_interleave(self.group, dim=-1)).unbind(-3)
        return self._convolve(before, states), partial(self._convolve, after)

    def _convolve(self, kernels: Tensor, states: Tensor) -> Tensor:
        """kernels [..., taps, H] of states [..., H]; a block's first row has none before it."""
        blocks = states.unflatten(-2, (-1, self.rows))
        taps = range(kernels.shape[-2])
        seen = [nn.functional.pad(blocks, (0, 0, back, 0))[..., : self.rows, :] for back in taps]
        return (kernels * torch.stack(seen, dim=-2).flatten(-4, -3)).sum(dim=-2)


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


class DFlashHead(VocabularyHead):
    """Predicts the tokens after an anchor, the last known token, from the features of all tokens before it.

    The layers' keys and values come from the fused features, and from the block: the anchor's embedding, then that of
    the mask token for each token that is to be drafted. Parameters are named as published. Embeddings are the target's.
    """

    kind = "dflash"
    reads_all_features = True
    embed_tokens = None
    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config, config.output)
        size, eps, vocab = config.hidden_size, config.layer.rms_norm_eps, config.vocab_size
        self.features, self.depth = config.features, config.heads
        self.rows, self.has_pairs = config.heads + (not config.from_anchor), config.pair_rank > 0
        self.fc = nn.Linear(len(config.features) * size, size, bias=False)
        self.hidden_norm, self.norm = Norm(size, eps), Norm(size, eps)
        layers = (
            LocalLayer(size, config.layer, self.rows, config.taps, config.group)
            if config.taps
            else DecoderLayer(size, config.layer)
            for _ in range(config.layers)
        )
        self.layers: Any = nn.ModuleList(layers)
        if config.candidates:
            self.candidate_selector = Selector(vocab, self.draft_size, config.pair_rank, size)
        elif self.has_pairs:
            self.markov_head = PairScores(vocab, self.draft_size, config.pair_rank)
        copy_last(self.fc)

    @property
    def pairs(self) -> Any:
        """The pair score, for heads that have one."""
        return self.candidate_selector if self.config.candidates else self.markov_head

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [B, N, K x F], lowest layer first -> fused features [B, N, H]."""
        return self.hidden_norm(self.fc(features))

    def read(self, fused: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [B, layers x G, N, D] of fused features at positions [B, N], those of all layers."""
        table = self.config.layer.rotary_table(positions, fused.dtype)
        keys, values = zip(*(layer.self_attn.keys_and_values(fused, table) for layer in self.layers), strict=True)
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)

    def begin_block(self, anchors: Tensor) -> Tensor:
        """The tokens [..., R] of blocks that begin with the anchors [...]."""
        return nn.functional.pad(anchors[..., None], (0, self.rows - 1), value=self.config.mask_token)

    def forward(self, states: Tensor, positions: Positions, attend: Attend) -> Tensor:
        """Blocks [B, R, H] at positions [B, R] -> states [B, R, H]; the last L of each block are its draft tokens'.

        attend: attention to the features and the block.
        """
        for number, layer in enumerate(self.layers):
            states = layer(states, positions, partial(attend, layer=number))
        return states

    def normalise(self, states: Tensor) -> Tensor:
        return self.norm(states)
