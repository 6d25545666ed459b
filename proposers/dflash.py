"""Drafting with block heads and flow maps: one pass gives the next tokens of all levels.

After "DFlash" (2026, arXiv 2602.06036) and FlashMap (2026); trees over a block's tokens as in DDTree, with the pair
score of DSpark between a token and its parent. Shapes: B rows, T tokens, W paths, S cache slots, R rows of a block, L
levels, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from decode import Target
from heads.layer_cache import LayerCache, hide
from proposers.head_proposer import HeadProposer
from proposers.medusa import MedusaDrafter
from proposers.tree_proposer import Inputs

NEVER = -1e4  # the logit of a token that is not to be drafted


class BlockProposer(HeadProposer):
    """Drafts blocks of tokens. Slot i of its cache is for the target's feature i, in all layers."""

    usual_width = 8
    levelwise: ClassVar[bool] = False

    def is_fixed(self, inputs: Inputs) -> bool:
        return False


class FlashMapProposer(BlockProposer):
    """Drafts with a `FlashMapHead`, from noise that depends on the positions alone."""

    @torch.inference_mode(mode=False)
    def begin(self, target: Target) -> None:
        before = self._borrowed_from
        super().begin(target)
        if self.head.starts is None or self._borrowed_from != before:
            self.head.draw(target.embedding_matrix)

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> MedusaDrafter:
        head, cache, anchors = self.head, self._history.cache, self.embedding(target)(inputs["roots"][:, None])
        positions = cache.positions(1 + head.depth, anchors.device)
        read = head.read(head.fuse_anchor(anchors), positions[:, :1])
        keys, values = (each.chunk(head.config.layers, dim=1) for each in read)
        seen = cache.text_mask(anchors.device, anchors.dtype, cache.window, 1 + head.depth)[:, None, 1:]
        mask = nn.functional.pad(seen, (0, 1))

        def attend(queries: Tensor, layer: int) -> Tensor:
            return cache.attend(queries, keys[layer], values[layer], mask, layer)

        return MedusaDrafter(head, head(positions[:, 1:], attend))


class DFlashProposer(BlockProposer):
    """Drafts with a `DFlashHead`."""

    def embedding(self, target: Target) -> Callable[[Tensor], Tensor]:
        """As z-lab's code: the head's own embeddings or the target's raw ones, with the head's own scale."""
        embed, scale = super().embedding(target), self.head.config.embedding_scale
        if self.head.embed_tokens is None:
            scale /= target.embedding_scale
        return embed if scale == 1 else lambda tokens: scale * embed(tokens)

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> DFlashDrafter:
        cache, embed = self._history.cache, self.embedding(target)
        return DFlashDrafter(self.head, inputs["roots"], cache, embed, self.head_window)


class DFlashDrafter:
    """Drafts one step after the texts in a cache: blocks that begin with the roots [B], all levels at once.

    most: the tokens that layers attend to, even those without a window; None: no limit.
    """

    def __init__(
        self,
        head: Any,
        roots: Tensor,
        cache: LayerCache,
        embed: Callable[[Tensor], Tensor],
        most: int | None = None,
    ) -> None:
        block = embed(head.begin_block(roots))  # [B, R, H]
        count, device = block.shape[1], block.device
        find_sight = head.config.find_sight
        masks = {
            (window, causal): make_mask(cache, block, min(filter(None, (window, most)), default=None), causal)
            for window, causal in map(find_sight, range(head.config.layers))
        }

        def attend(queries: Tensor, keys: Tensor, values: Tensor, layer: int) -> Tensor:
            return cache.attend(queries, keys, values, masks[find_sight(layer)], layer)

        self._head, self._states = head, head(block, cache.positions(count, device), attend)[:, -head.depth :]
        self._logits = head.cap(head.logits(self._states))  # [B, L, D]
        self._tokens = roots[:, None]  # [B, W] the last one of each path

    def logits(self, level: int) -> Tensor:
        head, logits = self._head, self._logits[:, level, None]
        if not head.has_pairs:
            return logits
        if not head.config.candidates:
            return logits + head.markov_head(self._tokens)
        likely, chosen = logits.topk(min(head.config.candidates, logits.shape[-1]))
        states = head.normalise(self._states[:, level, None])
        scores = likely + head.candidate_selector(states, self._tokens, chosen)  # [B, W, C]
        others = logits.new_full((*scores.shape[:2], logits.shape[-1]), NEVER)
        return others.scatter(-1, chosen.expand_as(scores), scores)

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        self._tokens = tokens


def make_mask(cache: LayerCache, block: Tensor, window: int | None, causal: bool) -> Tensor:
    """What the rows of blocks [B, R, H] attend to in the text and in the block: [B, 1, R, S] to add to the scores."""
    count, dtype = block.shape[1], block.dtype
    mask = nn.functional.pad(cache.text_mask(block.device, dtype, window, count), (0, count))
    if causal:
        mask[:, :, -count:] += hide(mask.new_ones(count, count).triu(1).bool(), dtype)
    return mask[:, None]
