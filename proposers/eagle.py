"""Drafting with EAGLE heads: level by level, on features that the head says itself where the target's end.

After Li et al., "EAGLE", "EAGLE-2" (2024) and "EAGLE-3" (2025). Shapes: B rows, T tokens, W paths, N nodes drafted so
far, S slots, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode import Target
from heads import Eagle3Head, EagleHead, LayerCache
from proposers.calibration import Calibration
from proposers.fixed_trees import Ranks
from proposers.head_proposer import LevelwiseProposer, in_chunks, pick_last
from proposers.packed_head import Logits
from proposers.tree_search import Candidates

Embed: TypeAlias = Callable[[Tensor], Tensor]  # tokens [...] to embeddings [..., H]
DEPTH, WIDTH = 6, 10  # of EAGLE-2


class EagleProposer(LevelwiseProposer):
    """Drafts with an `EagleHead` or an `Eagle3Head`, one pass of it over all paths a level.

    Slot i of its cache holds the target's feature i beside token i + 1, at position i. Before each draft it reads what
    was committed since the last, so that it never looks back on features of its own: to go on with those would cost
    8 to 15% of what is accepted (vLLM, #14649). A batch's rows may have different numbers of them.

    depth: levels of a tree at most. width: the paths that are followed at each, and the tokens that each gets there
    (EAGLE-2, section 4), of dynamic trees only; 1 drafts a chain. Everything else as in `HeadProposer`. Raises
    ValueError as it does, where depth or width are below 1, and for a width beside a fixed tree.
    """

    static = "eagle_25"
    depth = DEPTH  # in the place of the base's property: a head goes on for ever

    def __init__(
        self,
        head: EagleHead | Eagle3Head,
        *,
        depth: int = DEPTH,
        width: int | None = None,
        tree: str | Sequence[Ranks] = "dynamic",
        nodes: int | None = None,
        calibration: Calibration | None = None,
        sampled: bool = False,
    ) -> None:
        if width is not None and tree != "dynamic":
            raise ValueError(f"width is for a dynamic tree; {tree} has its own paths")
        width = WIDTH if width is None else width
        if depth < 1 or width < 1:
            raise ValueError(f"depth {depth} and width {width} must be at least 1")
        self.depth, self.width, self.ranks = depth, width, width
        super().__init__(head, tree=tree, nodes=nodes, calibration=calibration, sampled=sampled)

    def features(self) -> Tensor:
        """The head's states [B, H] behind each row's last committed token and its root, once it has caught up."""
        features, counts = self._hand_over()
        follow = [torch.tensor(text[-count:]) for text, count in zip(self.step.sequences, counts, strict=True)]
        tokens = pad_sequence(follow, batch_first=True).to(features.device)  # [B, T], each behind its feature
        embed = self._embedding(self.step.target)
        states = []
        for part, kept in in_chunks(counts):
            fused = self.head.fuse(features[:, part])
            positions = self._cache.positions(fused.shape[1], fused.device)
            states.append(self.head(embed(tokens[:, part]), fused, positions, context=self._cache))
            self._cache.keep(kept)
        return pick_last(torch.cat(states, dim=1), counts)

    def guess(self, features: Tensor, roots: Tensor, target: Target) -> EagleGuesses:
        """`features` are states that saw the roots already."""
        return EagleGuesses(self.head, self.logits, features, self._cache, self._embedding(target))

    def rehearse(self, features: Tensor, text: Tensor, begin: int, end: int, target: Target) -> EagleGuesses:
        embed, cache = self._embedding(target), LayerCache(1)
        fused = self.head.fuse(features[:, :end].to(self.dtype))
        states = self.head(embed(text[None, 1 : end + 1]), fused, cache.positions(end, text.device), context=cache)
        cache.keep([end])
        cache.select([0] * (end - begin))
        cache.crop(range(begin + 1, end + 1))
        return EagleGuesses(self.head, self.logits, states[0, begin:end], cache, embed)

    def check_calibration(self, depth: int) -> None:
        """A head goes on for ever, and levels that were not measured are trusted as the deepest that was."""

    def _draft(self, roots: Tensor, most: int, pays: Callable[[Tensor], bool]) -> Candidates:
        candidates = super()._draft(roots, most, pays)
        self._cache.crop([len(sequence) - 1 for sequence in self.step.sequences])  # the draft's own were not true
        return candidates

    def _embedding(self, target: Target) -> Embed:
        embed: Any = self.head.embed_tokens or target.model.get_input_embeddings()
        return lambda tokens: embed(tokens).to(self.dtype)


class EagleGuesses:
    """One step's guesses behind states [B, H] of texts that the cache holds. Nodes are laid behind them."""

    def __init__(
        self, head: EagleHead | Eagle3Head, logits: Logits, states: Tensor, cache: LayerCache, embed: Embed
    ) -> None:
        self.head, self.readout, self.tokens, self.embed = head, logits, head.tokens, embed
        self.cache, self.starts = cache, cache.positions(1, states.device)  # [B, 1]
        self.level = 0
        # What the head makes of the paths [B, W, H], and which nodes they are made of [B, W, N].
        self._ends = states[:, None], torch.zeros(len(states), 1, 0, dtype=torch.bool, device=states.device)

    def logits(self, level: int) -> Tensor:
        return self.readout(self._ends[0], level)

    def follow(self, origin: Tensor, tokens: Tensor) -> None:
        before, above = (part.gather(1, origin[..., None].expand(*origin.shape, part.shape[2])) for part in self._ends)
        itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        seen = torch.cat([above, itself], dim=2)
        positions = (self.starts + self.level).expand_as(tokens)  # siblings stand at one position
        states = self.head(self.embed(tokens), before, positions, self._mask(seen), self.cache)
        self.cache.keep([tokens.shape[1]] * len(tokens))
        self.level, self._ends = self.level + 1, (states, seen)

    def _mask(self, seen: Tensor) -> Tensor:
        """What the paths see, bool [B, 1, W, S]: all of the text, and of the nodes behind it those `seen` [B, W, N]."""
        paths, nodes = seen.shape[1:]
        slots = torch.arange(max(self.cache.lengths) + paths, device=seen.device)
        node = slots - self.starts  # [B, S]: the node in a slot; below 0 it is the text's, from `nodes` on padding
        own = seen.gather(2, node.clamp(0, nodes - 1)[:, None].expand(-1, paths, -1))
        return ((node < 0)[:, None] | own & (node < nodes)[:, None])[:, None]
