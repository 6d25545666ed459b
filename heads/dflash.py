"""Block heads: a few decoder layers that draft a whole block of tokens in one pass.

Sources: Chen et al., "DFlash" (2026, arXiv 2602.06036), whose layers attend to the target's features and to the block;
the pair score is the Markov head of "DSpark" (2026). DFlash2 (z-lab/dflash, dflash/model.py, 2026) has a selector for
it, and convolutions along the block. Shapes: B rows, N tokens, L draft tokens, R rows of a block, H the head's hidden
size, F the target's, K layers that are read, G key-value heads of a layer, D draft vocabulary, C candidates.
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
    published heads with a window. full_layers: layers without the window, whose rows see the whole block.

    Only for DFlash2: candidates: the pair score chooses among so many of a row's most likely tokens. taps, group: of
    `LocalConvolution`.

    Only of published heads: embedding: its own token embeddings instead of the target's. embedding_scale: of these, or
    of the target's raw ones. logit_factor, logit_cap: a logit l of the output layer becomes cap * tanh(factor * l /
    cap), without a cap factor * l.
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
    embedding: bool = False
    embedding_scale: float = 1.0
    logit_factor: float = 1.0
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        check_features(self.features)
        check_block(self.mask_token, self.vocab_size, heads=self.heads, layers=self.layers)
        if self.full_layers and (self.layer.window is None or not {*self.full_layers} < {*range(self.layers)}):
            raise ValueError(
                f"full_layers is {list(self.full_layers)}; the head has {self.layers} layers, and one of them at least "
                "must have a window"
            )
        self._check_dflash2()

    def _check_dflash2(self) -> None:
        sizes = self.candidates, self.taps, self.group
        if not any(sizes):
            return
        if min(*sizes, self.pair_rank) < 1:
            raise ValueError("a DFlash2 head has candidates, pair_rank, taps and group, each of 1 at least")
        if self.taps > self.heads + (not self.from_anchor):
            raise ValueError(f"taps is {self.taps}; a block has fewer rows")
        if self.hidden_size % self.group:
            raise ValueError(f"group is {self.group}; it must divide the hidden size, {self.hidden_size}")
        if (self.draft_size or self.vocab_size) < self.vocab_size:
            raise ValueError("a DFlash2 head drafts from the whole vocabulary")

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

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [...] -> the scores [..., D] of those after them."""
        return self.markov_w2(self.markov_w1(tokens))


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


class DFlashHead(VocabularyHead):
    """Predicts the tokens after an anchor, the last known token, from the features of all tokens before it.

    The layers' keys and values come from the fused features, and from the block: the anchor's embedding, then that of
    the mask token for each token that is to be drafted. Parameters are named as published.
    """

    kind = "dflash"
    reads_all_features = begins_with_tokens = True
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

    def cap(self, logits: Tensor) -> Tensor:
        """The head's logits from those of its output layer: scaled, then capped."""
        factor, limit = self.config.logit_factor, self.config.logit_cap
        logits = logits if factor == 1 else factor * logits
        return logits if limit is None else limit * (logits / limit).tanh()

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
