"""Drafting with a trained head: what all kinds of heads share.

How a tree is drafted: the head reads the target's features (`start_drafter`), a search asks the drafter for next tokens
level by level (`trees.search`), and the draft budget chooses how many of them become nodes (`draft_budget`).

Shapes: B rows, T tokens, F feature width, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, Self
from weakref import ref

import torch
from torch import Tensor

from decode import Sampling, Step, Target, Tree
from decode.sampling import group_rows
from heads import LayerCache
from heads.vocabulary import VocabularyHead
from proposers.calibration import LARGEST, Calibration
from proposers.draft_budget import DraftBudget
from proposers.fast_heads import DraftGraphs, Inputs, PackedOutput, pack_head
from proposers.feature_history import Counts, FeatureHistory, numbers_of
from proposers.trees.coupled import find_coupling, find_noise
from proposers.trees.draft import Draft
from proposers.trees.search import RANKS, Drafter, ScoredDrafter, search


class HeadProposer(ABC):
    """Drafts trees with a trained head.

    depth: how many levels a tree has at most. None takes as many as the method has.
    width: how broad a tree is: the paths that are followed at each level, and the next tokens of each path (EAGLE-2,
    section 4). 1 drafts a chain. None takes the method's width.
    nodes: the size of every tree, root included, unless the budget is smaller. None adapts it to this device, down to
    no draft at all.
    calibration: corrects the head's probabilities; None uses them as they are.

    Raises ValueError for an impossible size, for a calibration of another head, and, in its first step, for a
    head that was trained for another target.
    """

    levels: ClassVar[int | None] = None  # of a tree at most; None: one for each head
    width: int  # paths followed at each level, at most
    ranks = RANKS  # next tokens of each path that become candidates
    levelwise: ClassVar[bool] = True  # each level takes a pass of the head

    def __init__(
        self,
        head: VocabularyHead,
        *,
        depth: int | None = None,
        width: int | None = None,
        nodes: int | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.head: Any = head
        if width is not None:
            self.width = self.ranks = width
        heads = self.levels or self.head.config.heads
        self.depth = heads if depth is None else depth
        if self.depth < 1 or self.width < 1:
            raise ValueError(f"depth {self.depth} and width {self.width} must be at least 1")
        if self.levels is None and self.depth > heads:
            raise ValueError(f"depth is {self.depth}; this head drafts {heads} levels")
        if nodes is not None and nodes < 1:
            raise ValueError(f"nodes is {nodes}; a tree has at least its root")
        if calibration is not None and self.levels is None and len(calibration.acceptance) != heads:
            raise ValueError(f"the calibration is of {len(calibration.acceptance)} heads, not of {heads}")
        self.dtype = next(head.parameters()).dtype
        self.nodes, self.calibration = nodes, calibration
        self.adaptive = nodes is None  # trees are sized by the target's cost curve
        self.layers = tuple(self.head.features)
        self.draft_budget = DraftBudget() if calibration is None else DraftBudget(calibration.expect_tau(LARGEST))
        self._history = FeatureHistory()
        self._borrowed_from: ref[Any] | None = None  # the model whose output matrix the head uses, if it has no own
        self._graphs = DraftGraphs()

    def renew(self) -> Self:
        """The same proposer with nothing learned."""
        fresh = copy(self)
        fresh.draft_budget = DraftBudget(self.draft_budget.expected_tau)
        fresh._history, fresh._graphs = FeatureHistory(), DraftGraphs()
        return fresh

    def prepare(self, target: Target) -> Self:
        """Draft with a faster copy of the head (`proposers.fast_heads`), bound to the target. Returns itself."""
        self.begin(target)
        if not isinstance(self.head.logits, PackedOutput):
            self.head, self._graphs = pack_head(self.head), DraftGraphs()
        return self

    def check(self, target: Target) -> None:
        """Raise ValueError if the head was trained for another target."""
        self.head.check_target(target.config.hidden_size, target.vocabulary, target.config.num_hidden_layers)

    @torch.inference_mode(mode=False)  # the head may be trained later, with what it borrows here
    def begin(self, target: Target) -> None:
        """Make the head ready: on the target's device, with the target's output matrix if it has none of its own.

        Raises ValueError as `check` does, and if it was prepared for another target or device.
        """
        self.check(target)
        packed = isinstance(self.head.logits, PackedOutput)
        if packed and (device := self.head.logits.device) != target.device:
            raise ValueError(f"this proposer was prepared for {device}, not {target.device}; load it again")
        self.head.to(target.device)
        borrowed = self.head.borrowed
        if self.head.output != "target" or (borrowed is not None and self._borrowed_from == ref(target.model)):
            return
        if not packed:
            self.head.borrow(target.output_matrix, target.output_bias)
        elif not torch.equal(borrowed, self.head.drafted_rows(target.output_matrix).to(borrowed)):
            raise ValueError("this proposer was prepared for another target's output matrix; load it again")
        self._borrowed_from = ref(target.model)

    def observe(self, step: Step) -> None:
        """Take in the features of a finished step."""
        if self.head.reads_all_features:
            self._history.add(step, partial(self.read, step.target))

    def fuse(self, features: Tensor) -> Tensor:
        """The features [B, T, F] as the head attends to them. See `decode.Proposer`."""
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
        draft = self._draft(step, most)
        if not self.adaptive:
            return draft.tree(most)
        expected, right = draft.read_figures()
        self.draft_budget.take_drafting_time(perf_counter() - begun, draft.levels)
        self.draft_budget.take_levels(right)
        return draft.grown(self.draft_budget.choose_growth(expected, draft.levels))

    def _draft(self, step: Step, most: int) -> Draft:
        """What trees of up to `most` nodes are chosen from."""
        # No path is longer than a chain of all nodes. Deeper nodes than an answer has room for would be cut off.
        levels = min(self.depth, most - 1, max(2, *step.room) - 1)
        inputs = self.read_inputs(step, levels)
        target, budget = step.target, self.draft_budget if self.adaptive and self.levelwise else None
        if budget is not None and target.device.type != "cpu":
            levels = budget.choose_depth(levels)

        def find(inputs: Mapping[str, Tensor]) -> Draft:
            drafter = self.start_scored(inputs, target, step.samplings)
            shares = self.adaptive and self.draft_budget.unit < 1
            return search(inputs["roots"], drafter, levels, self.width, self.ranks, most, budget, self.adaptive, shares)

        if not target.has_graphs or not self.is_fixed(inputs) or len(group_rows(step.samplings)) > 1:
            return find(inputs)
        kind = levels, most, step.samplings[0].kind
        return self._graphs.run(target.model, self.written, kind, find, inputs)

    def read_inputs(self, step: Step, levels: int) -> Inputs:
        """`read_step`, with the roots and, where the target samples, the keys of its noise at so many levels."""
        is_greedy = all(sampling.greedy for sampling in step.samplings)
        keys = {} if is_greedy else {"keys": find_noise(step, levels)}
        return self.read_step(step) | {"roots": numbers_of(step)["roots"]} | keys

    def start_scored(
        self, inputs: Mapping[str, Tensor], target: Target, samplings: Sequence[Sampling]
    ) -> ScoredDrafter:
        """`start_drafter` for the tensors of `read_inputs`, with its tokens scored."""
        coupling = find_coupling(samplings, inputs.get("keys"))
        return ScoredDrafter(self.start_drafter(inputs, target), self.head.token_map, self.calibration, coupling)

    def embedding(self, target: Target) -> Callable[[Tensor], Tensor]:
        """A function from tokens [...] to the embeddings [..., H] that the head reads: its own, or the target's."""
        embed: Any = getattr(self.head, "embed_tokens", None) or target.model.get_input_embeddings()
        return lambda tokens: embed(tokens).to(self.dtype)

    @abstractmethod
    def read_step(self, step: Step) -> Inputs:
        """The tensors that a draft depends on, by name, without the roots. Called once a step: it may read features."""

    @abstractmethod
    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> Drafter:
        """The head's drafter for a step, from `read_step` and the "roots" [B]."""

    def read(
        self,
        target: Target,
        cache: LayerCache,
        features: Tensor,
        tokens: Tensor,
        counts: Counts,
        on_device: Tensor | None,
    ) -> Tensor:
        """Read features [B, T, *] and the tokens [B, T] after them into the head's cache. For heads that have one.

        Returns the states [B, T, H]. counts: the features of each row; on_device [B]: the same, if they are there.
        """
        raise NotImplementedError

    def is_fixed(self, inputs: Inputs) -> bool:
        """Whether drafting from these inputs can be a CUDA graph: the same tensor operations in every step."""
        return True

    @property
    def written(self) -> Tensor | None:
        """The keys of the cache that drafting writes to, if there is one."""
        return None
