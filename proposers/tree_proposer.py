"""Drafting trees with a drafter: anything that gives the probabilities of next tokens, level by level.

How a tree is drafted: the drafter takes in what the target has accepted (`observe`), a search asks it for next tokens
level by level (`search`), and the draft budget chooses how many of them become nodes (`draft_budget`). Trained
heads and small models differ in `observe`, `read_step` and `start_drafter` only.

Shapes: B rows, D draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from time import perf_counter
from typing import ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from decode import Sampling, Step, Target, Tree
from decode.devices.transfer import waits
from proposers.calibration import Calibration
from proposers.draft_budget import DraftBudget
from proposers.search import Draft, Drafter, ScoredDrafter, find_noise, search

Inputs: TypeAlias = dict[str, Tensor]  # what a draft depends on, by name
Find: TypeAlias = Callable[[Mapping[str, Tensor]], Draft]
Start: TypeAlias = Callable[[Mapping[str, Tensor], Target, Sequence[Sampling]], ScoredDrafter]


class TreeProposer(ABC):
    """Drafts trees with a drafter.

    depth: how many levels a tree has at most. width: the paths that are followed at each level, at most; ranks: the
    next tokens of each path that become candidates (EAGLE-2, section 4). 1 and 1 draft a chain, as all do for a target
    with a recurrent state.
    nodes: the size of every tree, root included, unless the budget is smaller. None adapts it to this device, down to
    no draft at all.
    calibration: corrects the drafter's probabilities; None uses them as they are.

    Raises ValueError for an impossible size.
    """

    layers: Sequence[int] = ()
    levelwise: ClassVar[bool] = True  # each level takes a pass of the drafter

    def __init__(
        self, *, depth: int, width: int, ranks: int, nodes: int | None, calibration: Calibration | None = None
    ) -> None:
        if depth < 1 or width < 1:
            raise ValueError(f"depth {depth} and width {width} must be at least 1")
        if nodes is not None and nodes < 1:
            raise ValueError(f"nodes is {nodes}; a tree has at least its root")
        self.depth, self.width, self.ranks, self.nodes, self.calibration = depth, width, ranks, nodes, calibration
        self.adaptive = nodes is None  # trees are sized by the target's cost curve
        self.draft_budget = DraftBudget()

    @property
    @abstractmethod
    def name(self) -> str:
        """What accepted tokens of a merged tree are counted under."""

    @property
    def token_map(self) -> Tensor | None:
        """The target's token of each draft id [D]; None: the same."""
        return None

    @property
    def unread(self) -> float:
        """What it has to read before the next draft, for a row on average, in the time of levels."""
        return 0.0

    def renew(self) -> Self:
        """The same proposer with nothing learned from texts."""
        fresh = copy(self)
        fresh.draft_budget = self.draft_budget.renew()
        return fresh

    @torch.no_grad()
    def propose(self, step: Step, budget: int) -> Tree:
        self.observe(step)
        if self.adaptive:
            self.draft_budget.observe(step)
        most = min(budget, self.nodes or budget)
        if most == 1 or (self.adaptive and self.draft_budget.is_backing_off()):
            self.draft_budget.skip()
            roots = self.find_roots(step)
            return Tree.chain_of(roots[:, None], torch.ones_like(roots))
        # No path is longer than a chain of all nodes. Deeper nodes than an answer has room for would be cut off.
        return self.draft(step, min(self.depth, most - 1, max(2, *step.room) - 1), most)

    def draft(self, step: Step, levels: int, most: int) -> Tree:
        """The best trees of at most so many levels and `most` nodes, as large as is worth their time."""
        begun, unread = perf_counter(), self.unread
        draft = self._search(step, levels, most)
        if not self.adaptive:
            return draft.largest
        expected, right = draft.read_figures()
        self.draft_budget.take_drafting_time(perf_counter() - begun, draft.levels + unread)
        self.draft_budget.take_levels(right)
        return draft.grown(self.draft_budget.choose_growth(expected, draft.levels))

    def _search(self, step: Step, levels: int, most: int, start: Start | None = None) -> Draft:
        """What trees of up to `most` nodes are chosen from. start: makes the drafter; None is `start_scored`."""
        inputs = self.read_inputs(step, levels)
        target, budget = step.target, self.draft_budget if self.adaptive and self.levelwise else None
        if budget is not None and waits(inputs["roots"]):
            levels = budget.choose_depth(levels)

        def find(inputs: Mapping[str, Tensor]) -> Draft:
            drafter = (start or self.start_scored)(inputs, target, step.samplings)
            shares = self.adaptive and self.draft_budget.unit < 1
            width, ranks = (1, 1) if target.is_recurrent else (self.width, self.ranks)
            return search(inputs["roots"], drafter, levels, width, ranks, most, budget, self.adaptive, shares)

        return self.run(find, inputs, target, step.samplings, (levels, most))

    def read_inputs(self, step: Step, levels: int) -> Inputs:
        """`read_step`, with the roots and, where the target samples, the keys of its noise at so many levels."""
        inputs = self.read_step(step) | {"roots": self.find_roots(step)}
        if any(not sampling.greedy for sampling in step.samplings):
            inputs["keys"] = find_noise(step, levels).to(self.find_device(step.target))
        return inputs

    def start_scored(
        self, inputs: Mapping[str, Tensor], target: Target, samplings: Sequence[Sampling]
    ) -> ScoredDrafter:
        """`start_drafter` for the tensors of `read_inputs`, with its tokens scored."""
        inner, keys = self.start_drafter(inputs, target), inputs.get("keys")
        return ScoredDrafter(inner, self.token_map, self.calibration, samplings, keys)

    def find_device(self, target: Target) -> torch.device:
        """Where it drafts."""
        return target.device

    def find_roots(self, step: Step) -> Tensor:
        """The roots [B], where it drafts."""
        assert step.upload is not None
        return step.upload["roots"].to(self.find_device(step.target))

    def run(self, find: Find, inputs: Inputs, target: Target, samplings: Sequence[Sampling], sizes: Hashable) -> Draft:
        """`find(inputs)`. sizes: what else it depends on."""
        return find(inputs)

    @abstractmethod
    def begin(self, target: Target) -> None:
        """Prepare for a target. Raises ValueError if it cannot draft for it."""

    @abstractmethod
    def observe(self, step: Step) -> None:
        """Take in a finished step. Called once a step, before the other methods."""

    @abstractmethod
    def read_step(self, step: Step) -> Inputs:
        """The tensors that a draft depends on, by name, without the roots. Called once a draft: it may read tokens."""

    @abstractmethod
    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> Drafter:
        """The drafter for a step, from `read_step` and the "roots" [B]."""
