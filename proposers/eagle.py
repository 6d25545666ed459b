"""EAGLE drafting. Committed tokens use the target's features; draft tokens use the head's own predictions of them.

After Li et al., "EAGLE", "EAGLE-2" (2024) and "EAGLE-3" (2025). Shapes: B rows, T tokens, W paths, S cache slots, H
hidden size, D draft vocabulary, R queries that share a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from decode import Step, Target
from decode.devices.transfer import waits
from heads.layer_cache import LayerCache, hide
from proposers.fast_heads import FastPass, pad_tokens
from proposers.feature_history import READ_AT_ONCE, FeaturePart, expand_last, pick_last
from proposers.head_proposer import HeadProposer
from proposers.medusa import MedusaDrafter
from proposers.search import Drafter
from proposers.tree_proposer import Inputs

DEPTH, WIDTH = 6, 10  # of EAGLE-2


class EagleProposer(HeadProposer):
    """Drafts with an EAGLE, EAGLE-3 or MTP head, one pass of it over all paths a level.

    Slot i of its cache is for the target's feature i with token i + 1, at position i. Before each draft the head reads
    the features committed since the last. It never attends to its own features of earlier drafts, which would cost 8 to
    15% of acceptance (vLLM, #14649).
    """

    levels: ClassVar[int | None] = DEPTH
    usual_width, usual_ranks = WIDTH, WIDTH
    _pass: FastPass | None = None  # of the packed head

    def prepare(self, target: Target) -> Self:
        super().prepare(target)
        if self.may_be_graph and (self._pass is None or self._pass.head is not self.head):
            self._pass = FastPass(self.head, self.dtype, compiles=target.compiled)
        return self

    @property
    def may_be_graph(self) -> bool:
        """Not an MTP module, whose layer is transformers' own code."""
        return hasattr(self.head.config, "layer")

    @property
    def fast_pass(self) -> FastPass:
        """A pass of the head."""
        return self._pass or FastPass(self.head, self.dtype)

    @property
    def reads_keys_alone(self) -> bool:
        """With one layer, whose code is ours, keys and values depend on no attention."""
        return hasattr(self.head, "read") and getattr(self.head.config, "layers", 1) == 1

    def read_step(self, step: Step) -> Inputs:
        """What a draft starts from: the head's last states, or on a GPU the features that its graph is to read.

        Many features at once, as of a prompt, are read here on a GPU too.
        """
        self._history.read_prompts(self.reader(step))
        cache, device = self._history.cache, step.target.device
        if (
            self.may_be_graph
            and cache.window is None
            and cache.held is not None
            and waits(cache.held[0])
            and max(self._history.unread_counts) <= READ_AT_ONCE
        ):
            unread, lengths = self._history.take(), cache.lengths_on(device)
            more = pad_tokens(unread.features.shape[1]) + self.depth * self.width
            cache.reserve(max(cache.lengths) + more)
            capacity, backend = cache.held[0].shape[2], step.target.backend
            gains = backend.sees_texts_whole(self.dtype, self.head.config.layer.head_dim)
            self.seen_slots = backend.find_window(cache.lengths, capacity, more) if gains else (0, capacity)
            cache.keep(unread.counts, unread.counts_tensor)
            numbers = {"counts": unread.counts_tensor, "lengths": lengths}
            return {"features": unread.features, "following": unread.following, **numbers}
        return super().read_step(step)

    def read_features(self, target: Target, cache: LayerCache, part: FeaturePart, keys_alone: bool = False) -> Tensor:
        given = self.embedding(target)(part.following), part.features.to(self.dtype)
        positions = cache.positions(part.features.shape[1], part.features.device)
        if keys_alone and self.reads_keys_alone:
            states = part.features
            cache.write(*self.head.read(*given, positions))
        else:
            states = self.fast_pass(*given, cache, positions)
        cache.keep(part.counts, part.counts_tensor)
        return states

    def is_fixed(self, inputs: Inputs) -> bool:
        return "features" in inputs

    @property
    def written(self) -> Tensor | None:
        held = self._history.cache.held
        return None if held is None else held[0]

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> Drafter:
        cache, states = self._history.cache, inputs.get("last")
        if states is None:
            cache, counts = cache.at_fixed_shape(inputs["lengths"], self.seen_slots), inputs["counts"]
            part = FeaturePart(inputs["features"], inputs["following"], counts, [0] * len(counts))
            states = pick_last(self.read_features(target, cache, part), counts)
        tokens = self.depth * self.width
        return EagleDrafter(self.fast_pass, states, cache, self.embedding(target), self.depth, tokens)


class JumpProposer(EagleProposer):
    """Drafts with a `JumpHead`. Slot i of its cache is for token i of the text: its keys and values are all that is
    read of it. A draft begins with a pass over its root."""

    def read_features(self, target: Target, cache: LayerCache, part: FeaturePart, keys_alone: bool = False) -> Tensor:
        return self.head.above(HeadProposer.read_features(self, target, cache, part))

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> Drafter:
        drafter, roots = super().start_drafter(inputs, target), inputs["roots"][:, None]
        drafter.extend(torch.zeros_like(roots), roots)
        return drafter


class PEagleProposer(EagleProposer):
    """Drafts with a `PEagleHead`: one pass over new features and over the positions that are not drafted yet."""

    levels, levelwise = None, False
    may_be_graph = False

    @torch.no_grad()
    def observe(self, step: Step) -> None:
        if step.is_first:  # the head may have been trained since the last batch
            self._unknown = self.head.unknown(self.depth - 1)
        super().observe(step)

    def read_step(self, step: Step) -> Inputs:
        history, read = self._history, self.reader(step)
        history.read_prompts(read)
        if max(history.unread_counts) > READ_AT_ONCE:  # as of a prompt
            history.read_but_last(read)
        unread = history.take()
        unread = replace(unread, features=unread.features.to(self.dtype))
        return {"states": draft_ahead(self.head, self.embedding(step.target), history.cache, unread, *self._unknown)}

    def read_along(self, target: Target, features: Tensor, text: Tensor, begin: int, end: int) -> Inputs:
        super().read_along(target, features, text, begin, end)
        cache, one = self._history.cache, torch.ones(end - begin, dtype=torch.long, device=text.device)
        cache.crop(range(begin, end))  # the last feature is read with what is unknown
        fused, roots = self.head.fuse(features[0, begin:end, None]), text[begin + 1 : end + 1, None]
        last, unknown = FeaturePart(fused, roots, one, one.tolist()), self.head.unknown(self.depth - 1)
        return {"states": draft_ahead(self.head, self.embedding(target), cache, last, *unknown)}

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> MedusaDrafter:
        return MedusaDrafter(self.head, inputs["states"])


def draft_ahead(
    head: Any, embed: Callable[[Tensor], Tensor], cache: LayerCache, part: FeaturePart, unknown: Tensor, fused: Tensor
) -> Tensor:
    """The states [B, U + 1, H] of a P-EAGLE draft after fused features, which the head reads in the same pass.

    unknown [U], fused [U, H]: what stands for tokens and features that are not known (`PEagleHead.unknown`). These
    positions follow each row's features directly. So attention to all that is before is right for both, and the cache
    keeps the features alone.
    """
    count, device = len(unknown), part.features.device
    rows = torch.arange(len(part.counts), device=device)[:, None]
    columns = part.counts_tensor[:, None] + torch.arange(-1, count, device=device)  # [B, U + 1]: the last known first
    tokens, features = nn.functional.pad(part.following, (0, count)), nn.functional.pad(part.features, (0, 0, 0, count))
    tokens[rows, columns[:, 1:]], features[rows, columns[:, 1:]] = unknown, fused
    states = head(embed(tokens), features, cache.positions(tokens.shape[1], device), cache.attend)
    cache.keep(part.counts, part.counts_tensor)
    return states[rows, columns]


class EagleDrafter:
    """Drafts one step after the texts in a cache, from their last states [B, H].

    levels, tokens: of a draft, at most. Its tokens take slots after the texts; at fixed shape the last ones, and
    attention sees all slots at each level. Then nothing needs the host: a draft can be a CUDA graph.
    """

    def __init__(
        self,
        fast_pass: FastPass,
        states: Tensor,
        cache: LayerCache,
        embed: Callable[[Tensor], Tensor],
        levels: int,
        tokens: int,
    ) -> None:
        self.fast_pass, self.head, self.cache, self.embed, self.level = fast_pass, fast_pass.head, cache, embed, 0
        self.states = states[:, None]  # [B, W, H]: the last one of each path
        layer: Any = getattr(self.head.config, "layer", None)
        self.positions = cache.positions(levels, states.device)  # [B, L]
        needs_table = layer is not None and not fast_pass.is_compiled
        self.table = layer.rotary_table(self.positions, states.dtype) if needs_table else None
        self.first, end = cache.sees or (0, max(cache.lengths) + tokens)
        self.slot = torch.arange(self.first, end, device=states.device)  # [S]: those that need a mask
        self.text_end = self.begin = len(self.slot) - tokens  # the place of the next level's first slot
        hidden = self.slot >= self.positions[:, :1, None]  # [B, 1, S]
        if cache.window is not None:
            hidden |= self.slot <= self.positions[:, :1, None] - cache.window
        # [B, R, W, S]: what each path's last node attends to; at fixed shape the same for R queries that share a key
        shared = 1 if layer is None or cache.sees is None else layer.num_attention_heads // layer.num_key_value_heads
        mask = hide(hidden, states.dtype)[:, None].expand(-1, shared, -1, -1)
        self.text_mask, self.mask = mask.split([self.text_end, tokens], dim=3)  # all paths have the same text

    def logits(self, level: int) -> Tensor:
        return self.head.logits(self.states, level)

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        count, drafted, window = parents.shape[1], self.begin - self.text_end, self.cache.window
        end = self.begin + count
        above = parents[:, None, :, None].expand(-1, self.mask.shape[1], -1, self.mask.shape[3])
        self.mask = self.mask.gather(2, above)
        self.mask[..., drafted : drafted + count].diagonal(dim1=2, dim2=3).zero_()  # each sees itself
        if window is not None:  # the tokens of a draft are not hidden from each other
            left = self.slot[: self.text_end] <= self.positions[:, self.level, None] - window  # [B, S]
            self.text_mask = self.text_mask.masked_fill(left[:, None, None], torch.finfo(self.mask.dtype).min)
        own = self.mask[..., : drafted + count] if self.cache.sees is None else self.mask
        mask = torch.cat([self.text_mask.expand(-1, -1, count, -1), own], dim=3)
        slots = slice(self.first + self.begin, self.first + end)
        mask = mask.flatten(1, 2)[:, None]
        states = self.states.gather(1, expand_last(parents, self.states))
        at = self.level, self.level + 1
        positions = self.table.part(*at) if self.table is not None else self.positions[:, slice(*at)].expand(-1, count)
        self.states = self.fast_pass(self.embed(tokens), states, self.cache, positions, mask, slots)
        self.level, self.begin = self.level + 1, end
