"""Drafting with a trained head: what all kinds of heads share.

How a tree is drafted: the head reads the target's features (`start_drafter`), a search asks the drafter for next tokens
level by level (`trees.search`), and the draft budget chooses how many of them become nodes (`draft_budget`).

Shapes: B rows, T tokens, F feature width, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode import Step, Target, Tree
from decode.gpu.transfer import Upload, copy_packed
from heads import LayerCache
from heads.vocabulary import VocabularyHead
from proposers.calibration import LARGEST, Calibration
from proposers.draft_budget import DraftBudget
from proposers.packed_head import PackedOutput, attend_like_target, pack_head
from proposers.trees.fixed import PUBLISHED, FixedTree, Ranks, check_tree, cut_tree
from proposers.trees.sampled import SampledTokens, renumber
from proposers.trees.search import RANKS, Candidates, Drafter, ScoredDrafter, fill_tree, search

CHUNK = 512  # tokens per row and pass of a head while it reads a prompt


class HeadProposer(ABC):
    """Drafts trees with a trained head.

    depth: levels of a tree at most; None is as many as the method has. width: paths followed at each level of a dynamic
    tree at most, and next tokens of each path (EAGLE-2, section 4); 1 drafts a chain, None is the method's.
    tree: "dynamic" takes the most likely nodes in each text; "calibrated" the tree that was best on average when the
    head was measured; "static" the method's published tree. Or a name in `trees.fixed.PUBLISHED`, or paths of ranks.
    nodes: the size of every tree, root included, unless tree or budget is smaller. None adapts it to this device, down
    to no draft at all.
    calibration: corrects the head's probabilities; None uses them as they are.
    sampled: if the target samples, sample the draft tokens as well (`proposers.trees.sampled`). The text keeps its
    distribution, but a seed gives another text than without a proposer.

    Raises ValueError for an impossible tree or size, for a calibration of another head, and, in its first step, for a
    head that was trained for another target.
    """

    static: ClassVar[str] = "mc_sim_7b_63"  # its name in `PUBLISHED`
    levels: ClassVar[int | None] = None  # of a tree at most; None: one for each head
    width: int  # paths followed at each level of a dynamic tree, at most
    ranks = RANKS  # next tokens of each path that become candidates
    levelwise: ClassVar[bool] = True  # each level takes a pass of the head

    def __init__(
        self,
        head: VocabularyHead,
        *,
        depth: int | None = None,
        width: int | None = None,
        tree: str | Sequence[Ranks] = "dynamic",
        nodes: int | None = None,
        calibration: Calibration | None = None,
        sampled: bool = False,
    ) -> None:
        self.head: Any = head
        if width is not None:
            if tree != "dynamic":
                raise ValueError(f"width is for a dynamic tree; {tree} has its own paths")
            self.width = self.ranks = width
        heads = self.levels or self.head.config.heads
        self.depth = heads if depth is None else depth
        if self.depth < 1 or self.width < 1:
            raise ValueError(f"depth {self.depth} and width {self.width} must be at least 1")
        if nodes is not None and nodes < 1:
            raise ValueError(f"nodes is {nodes}; a tree has at least its root")
        if calibration is not None and self.levels is None and len(calibration.acceptance) != heads:
            raise ValueError(f"the calibration is of {len(calibration.acceptance)} heads, not of {heads}")
        self.dtype = next(head.parameters()).dtype
        self.nodes, self.sampled, self.calibration = nodes, sampled, calibration
        self.paths = choose_paths(tree, calibration, self.static)
        self.draft_budget = DraftBudget() if calibration is None else DraftBudget(calibration.expect_tau(LARGEST))
        self._history = FeatureHistory()
        self._borrowed_from: Any = None  # the model whose output matrix the head uses, if it has none of its own
        self._fixed_trees: dict[tuple[Any, ...], FixedTree] = {}

    @property
    def layers(self) -> Sequence[int]:
        return tuple(self.head.features)

    @property
    def adaptive(self) -> bool:
        """Whether trees are sized by the target's cost curve."""
        return self.nodes is None

    @property
    def reads_all_features(self) -> bool:
        """Whether the head attends to all features of a text, not to the last committed token's alone."""
        return bool(self.head.reads_all_features)

    def renew(self) -> Self:
        """The same proposer with nothing learned."""
        fresh = copy(self)
        fresh.draft_budget = DraftBudget(self.draft_budget.expected_tau)
        fresh._history, fresh._fixed_trees = FeatureHistory(), {}
        return fresh

    def prepare(self, target: Target) -> Self:
        """Bind to the target, and draft with a faster copy of the head (`proposers.packed_head`). Returns itself."""
        self.bind(target)
        if not isinstance(self.head.logits, PackedOutput):
            self.head = pack_head(self.head)
        return self

    def check(self, target: Target) -> None:
        """Raise ValueError if the head was trained for another target."""
        self.head.check_target(target.config.hidden_size, target.vocabulary, target.config.num_hidden_layers)

    @torch.inference_mode(mode=False)  # the head may be trained later, with what it borrows here
    def bind(self, target: Target) -> None:
        """Move the head to the target's device and let it borrow the target's output matrix, if it has none.

        Raises ValueError as `check` does, and if it was prepared for another target or device.
        """
        self.check(target)
        packed = isinstance(self.head.logits, PackedOutput)
        if packed and (device := self.head.logits.device) != target.device:
            raise ValueError(f"this proposer was prepared for {device}, not {target.device}; load it again")
        self.head.to(target.device)
        borrowed = self.head.borrowed
        if self.head.output != "target" or (borrowed is not None and self._borrowed_from is target.model):
            return
        if not packed:
            self.head.borrow(target.output_matrix, target.output_bias)
        elif not torch.equal(borrowed, self.head.drafted_rows(target.output_matrix).to(borrowed)):
            raise ValueError("this proposer was prepared for another target's output matrix; load it again")
        self._borrowed_from = target.model

    def observe(self, step: Step) -> None:
        """Take in a finished step: the head's output matrix before the first one, and the features that it reads."""
        if step.is_prefill:
            self.bind(step.target)
        if self.reads_all_features:
            assert step.features is not None
            self._history.add(step, step.features if step.is_fused else self.combine(step.features))

    def fuse(self, target: Target, features: Tensor) -> Tensor:
        """What the head needs of a prompt's features [B, T, F], before its first step."""
        self.bind(target)
        return self.combine(features)

    def combine(self, features: Tensor) -> Tensor:
        """The features [B, T, F] as the head attends to them."""
        return features

    @torch.no_grad()
    def propose(self, step: Step, budget: int) -> Tree:
        self.observe(step)
        if self.adaptive:
            self.draft_budget.observe(step)
        roots = numbers_of(step)["roots"]
        most = min(budget, self.nodes or budget)
        if most == 1 or (self.adaptive and self.draft_budget.is_backing_off()):
            self.draft_budget.skip()
            return Tree.chain_of(roots[:, None], torch.ones_like(roots))
        begun = perf_counter()
        sampled = self.sampled and not step.sampling.greedy  # greedy targets take the most likely token, so do drafts
        candidates = self._find_candidates(step, roots, most, sampled)
        if not self.adaptive:
            return candidates.tree(most)
        expected, right = candidates.read_figures(most)
        self.draft_budget.take_drafting_time(perf_counter() - begun, candidates.levels)
        self.draft_budget.take_levels(right)
        return candidates.tree(self.draft_budget.choose_size(expected, candidates.levels, sampled))

    def _find_candidates(self, step: Step, roots: Tensor, most: int, sampled: bool) -> Candidates:
        # No path is longer than a chain of all nodes. Deeper nodes than an answer has room for would be cut off.
        levels = min(self.depth, most - 1, max(2, *step.room) - 1)
        sampler = SampledTokens(step) if sampled else None
        drafter = ScoredDrafter(self.start_drafter(step, roots), self.head.token_map, self.calibration, sampler)
        if self.paths is None:
            depth_budget = self.draft_budget if self.adaptive and self.levelwise else None
            if depth_budget is not None and roots.device.type != "cpu":
                levels = depth_budget.choose_depth(levels)
            return search(roots, drafter, levels, self.width, self.ranks, most, depth_budget)
        key = levels, most, sampled, roots.device
        if key not in self._fixed_trees:
            paths = cut_tree(renumber(self.paths) if sampled else self.paths, levels, self.head.draft_size, most - 1)
            self._fixed_trees[key] = FixedTree.from_paths(paths, roots.device)
        return fill_tree(roots, drafter, self._fixed_trees[key])

    def embedding(self, target: Target) -> Callable[[Tensor], Tensor]:
        """From tokens [...] to the embeddings [..., H] that the head reads: its own, or the target's."""
        embed: Any = getattr(self.head, "embed_tokens", None) or target.model.get_input_embeddings()
        return lambda tokens: embed(tokens).to(self.dtype)

    @abstractmethod
    def start_drafter(self, step: Step, roots: Tensor) -> Drafter:
        """The head's drafter for this step, after the roots [B]."""


class FeatureHistory:
    """The target's features of a batch, for heads that attend to all of them.

    Those the head has read are in its cache. The others wait: a step without a draft takes no pass of the head.
    """

    def add(self, step: Step, features: Tensor) -> None:
        """Take in a step's features as the head attends to them."""
        if step.is_prefill:
            self.cache = LayerCache(len(step.request_ids), attend_like_target)
            self._unread: list[FeaturePart] = []
        elif len(step.kept) < len(self.cache.lengths):
            self.cache.select(step.kept)
            self._unread = [part.select(step.kept) for part in self._unread]
        numbers, counts = numbers_of(step), [len(tokens) for tokens in step.committed]
        features = features[:, : max(counts)]  # a row with a longer prompt may have ended
        self._unread.append(FeaturePart(features, numbers["following"], numbers["counts"], counts))

    @property
    def unread_counts(self) -> list[int]:
        """Each row's number of features that the head has not read."""
        return [sum(each) for each in zip(*(part.counts for part in self._unread), strict=True)]

    def take(self) -> FeaturePart:
        """The features that the head has not read, to be read now."""
        unread, self._unread = join_parts(self._unread), []
        return unread

    def read(self, dtype: torch.dtype, read: Callable[[Tensor, Tensor, list[int], Tensor | None], Tensor]) -> Tensor:
        """Let a head read the features that it has not read; returns each row's last state [B, H].

        read: from features [B, T, F], padded at the right, the tokens [B, T] after them, and each row's number of them,
        to states [B, T, H]; it adds them to the cache. The root is the last of the tokens. The numbers come as a list
        and, if all features are read at once, as a tensor [B].
        """
        unread = self.take()
        counts, features = unread.counts, unread.features.to(dtype)
        if max(counts) <= CHUNK:
            return pick_last(read(features, unread.following, counts, unread.counts_tensor), unread.counts_tensor)
        states = []
        for begin in range(0, max(counts), CHUNK):
            part = slice(begin, begin + CHUNK)
            sizes = [min(max(count - begin, 0), CHUNK) for count in counts]
            states.append(read(features[:, part], unread.following[:, part], sizes, None))
        return pick_last(torch.cat(states, dim=1), unread.counts_tensor)


@dataclass(frozen=True)
class FeaturePart:
    """Features of one or more steps, padded at the right."""

    features: Tensor  # [B, T, F]
    following: Tensor  # [B, T]: the token after each
    counts_tensor: Tensor  # [B]
    counts: list[int]  # the same: features of each row

    def select(self, rows: Sequence[int]) -> FeaturePart:
        """The same for some rows only."""
        index = copy_packed({"rows": torch.tensor(rows)}, self.features.device)["rows"]
        counts = [self.counts[row] for row in rows]
        return FeaturePart(self.features[index], self.following[index], self.counts_tensor[index], counts)


def join_parts(parts: Sequence[FeaturePart]) -> FeaturePart:
    """Several steps' features one after another in each row."""
    if len(parts) == 1:
        return parts[0]
    counts = [sum(each) for each in zip(*(part.counts for part in parts), strict=True)]

    def join(name: str) -> Tensor:
        rows = ([getattr(part, name)[row, : part.counts[row]] for part in parts] for row in range(len(counts)))
        return pad_sequence([torch.cat(row) for row in rows], batch_first=True)

    together = torch.stack([part.counts_tensor for part in parts]).sum(dim=0)
    return FeaturePart(join("features"), join("following"), together, counts)


def numbers_of(step: Step) -> Upload:
    """The step's numbers on the device, which the loop gives to every proposer that names layers."""
    assert step.upload is not None
    return step.upload


def pick_last(states: Tensor, counts: Tensor) -> Tensor:
    """Each row's last state [B, H], from states [B, T, H] of `counts` [B] tokens a row."""
    return states.gather(1, expand_last((counts - 1)[:, None], states))[:, 0]


def expand_last(index: Tensor, like: Tensor) -> Tensor:
    """Indices [B, W] of whole vectors, for `gather` from `like` [B, *, H]."""
    return index[..., None].expand(-1, -1, like.shape[2])


def pick_last_features(step: Step) -> Tensor:
    """The features [B, F] of each row's last committed token."""
    assert step.features is not None
    return pick_last(step.features, numbers_of(step)["counts"])


def choose_paths(tree: str | Sequence[Ranks], calibration: Calibration | None, static: str) -> tuple[Ranks, ...] | None:
    """The paths of a fixed tree, or None for a dynamic one. static: the name of the method's published tree."""
    if not isinstance(tree, str):
        return check_tree(tree)
    if tree == "dynamic":
        return None
    if tree == "calibrated":
        if calibration is None:
            raise ValueError("the head was not calibrated; run scripts/calibrate.py, or choose another tree")
        return calibration.best_tree(LARGEST)
    if tree != "static" and tree not in PUBLISHED:
        raise ValueError(f"there is no tree {tree!r}; choose from dynamic, calibrated, static, {', '.join(PUBLISHED)}")
    return PUBLISHED[static if tree == "static" else tree]
