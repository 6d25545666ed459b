"""What proposers that draft with a trained head share: checks, the choice of a tree, and of its number of nodes.

Shapes: B rows, T tokens, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from time import perf_counter
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode import Step, Target, Tree
from heads import LayerCache
from heads.vocabulary import VocabularyHead
from proposers.calibration import LARGEST, Calibration, trust_blindly
from proposers.draft_budget import Pace
from proposers.fixed_trees import PUBLISHED, Ranks, Shape, check_tree, cut_tree
from proposers.packed_head import Logits, Readout, pack_head
from proposers.sampled_trees import Draws, foresee, keep_order, renumber
from proposers.tree_search import RANKS, Candidates, Confidence, Guesses, Pick, fill_shape, pick_likeliest, search

CHUNK = 512  # tokens a row and pass of a head, where it reads a prompt


class HeadProposer(ABC):
    """Drafts with a head, at most as deep as it looks ahead.

    tree: "dynamic" takes the nodes that are likeliest in each text; "calibrated" the tree that was best on average
    when the head was measured; "static" the one that was published with the method, or the name of another in
    `proposers.fixed_trees.PUBLISHED`, or paths of ranks. nodes: exactly so many (root included, as far as budget and tree
    have them); None takes as many as bring most tokens a second on this device, which may be none.
    calibration: what was measured of the head; without it, it is taken at its word. sampled: where the target samples,
    draw the tokens from the head's own law (`proposers.sampled_trees`) instead of taking its likeliest; the law of the text
    stays what it is, but a seed no longer gives the text that it gives without a proposer.

    Raises ValueError for a tree or a number of nodes that cannot be, and for a head that was trained for another
    target when it meets the target.
    """

    static: ClassVar[str] = "mc_sim_7b_63"  # its name in `PUBLISHED`
    width: int  # paths followed at each level of a dynamic tree
    ranks = RANKS  # likeliest next tokens of each of them that may become nodes

    def __init__(
        self,
        head: VocabularyHead,
        *,
        tree: str | Sequence[Ranks] = "dynamic",
        nodes: int | None = None,
        calibration: Calibration | None = None,
        sampled: bool = False,
    ) -> None:
        self.head: Any = head
        if nodes is not None and nodes < 1:
            raise ValueError(f"nodes is {nodes}; a tree has at least its root")
        if calibration is not None:
            self.check_calibration(len(calibration.acceptance))
        self.logits: Logits = head.logits
        self.dtype = next(head.parameters()).dtype
        self.nodes, self.sampled, self.paths = nodes, sampled, choose_paths(tree, calibration, self.static)
        self.confidence = trust_blindly if calibration is None else calibration.trust
        self.pace = Pace() if calibration is None else Pace(calibration.expect_tau(LARGEST))
        self.step: Step
        self._lender: Any = None  # the model whose output matrix the head uses, where it has none of its own
        self._shapes: dict[tuple[Any, ...], Shape] = {}  # by nodes, levels, whether tokens are drawn, and device

    @property
    def depth(self) -> int:
        """The levels of a tree at most."""
        return int(self.head.depth)

    @property
    def layers(self) -> Sequence[int]:
        return tuple(self.head.features)

    @property
    def adaptive(self) -> bool:
        """Whether trees are sized by the target's cost curve."""
        return self.nodes is None

    def renew(self) -> Self:
        """The same proposer with nothing learned."""
        fresh = copy(self)
        fresh.pace, fresh._shapes = Pace(self.pace.hopes), {}
        return fresh

    def prepare(self, target: Target) -> Self:
        """Make drafting fast on this target's device: on a CPU, with a packed copy of the head. Returns itself."""
        self.bind(target)
        if not isinstance(self.logits, Readout):
            self.head, self.logits = pack_head(self.head)
        return self

    def check(self, target: Target) -> None:
        """Raise ValueError where the head was trained for another target."""
        self.head.check_target(target.config.hidden_size, target.vocabulary, target.config.num_hidden_layers)

    def check_calibration(self, depth: int) -> None:
        """Raise ValueError where a calibration of so many levels cannot be this head's."""
        if depth != self.depth:
            raise ValueError(f"the calibration is of {depth} heads, not of {self.depth}")

    def observe(self, step: Step) -> None:
        if step.is_prefill:
            self.bind(step.target)
        if self.nodes is None:
            self._learn(step)
        self.step = step

    @torch.no_grad()
    def propose(self, step: Step, budget: int) -> Tree:
        self.observe(step)
        roots = torch.tensor(self.step.bonus, device=self.step.target.device)
        most = min(budget, self.nodes or budget)
        if most > 1 and self.nodes is not None:
            return self._draft(roots, most, lambda scores: True).tree(most)
        if most > 1 and not self.pace.rests():
            return self._draft_worthwhile(roots, most)
        self.pace.skip()
        return Tree.chain_of(roots[:, None], torch.ones_like(roots))

    def _learn(self, step: Step) -> None:
        if not step.is_prefill:
            accepted = sum(len(path) - 1 for path in step.path) / len(step.path)
            self.pace.learn(accepted, step.seconds)
        if step.is_prefill or len(step.request_ids) < len(self.step.request_ids):
            self.pace.begin(step.target.cost_curve(len(step.request_ids)), anew=step.is_prefill)

    def _draft_worthwhile(self, roots: Tensor, most: int) -> Tree:
        """As many nodes as pay. The rows of a batch share one forward pass, and so one number of nodes."""
        begun = perf_counter()
        candidates = self._draft(roots, most, self._pays)
        gains = (candidates.gains(most) / len(roots)).tolist()  # a GPU is waited for here
        self.pace.clock(perf_counter() - begun, candidates.levels)
        choose = self.pace.grow if self._draws else self.pace.choose
        return candidates.tree(choose(gains, candidates.levels))

    def _draft(self, roots: Tensor, most: int, pays: Callable[[Tensor], bool]) -> Candidates:
        guesses = self.guess(self.features(), roots, self.step.target)
        if not self._draws:
            return self._find(roots, guesses, most, pays, self.confidence, pick_likeliest)
        draws = Draws(self.step)
        candidates = self._find(roots, guesses, most, foresee(pays), keep_order(self.confidence), draws.pick)
        return draws.attach(candidates, guesses.tokens)

    def _find(
        self,
        roots: Tensor,
        guesses: Guesses,
        most: int,
        pays: Callable[[Tensor], bool],
        confidence: Confidence,
        pick: Pick,
    ) -> Candidates:
        # No path is longer than a chain of all nodes, and what has no room in the answer would be cut off.
        levels = min(self.depth, most - 1, max(2, *self.step.room) - 1)
        if self.paths is None:
            return search(roots, guesses, levels, self.width, confidence, pays, self.ranks, pick)
        key = most, levels, self._draws, roots.device
        if key not in self._shapes:
            paths = renumber(self.paths) if self._draws else self.paths
            paths = cut_tree(paths, levels, self.head.draft_size, most - 1)
            self._shapes[key] = Shape.of(paths, roots.device)
        return fill_shape(roots, guesses, self._shapes[key], confidence, pick)

    @property
    def _draws(self) -> bool:
        """Whether this step's tokens are drawn. At temperature 0 the target takes its likeliest; so does the head."""
        return self.sampled and not self.step.sampling.greedy

    @torch.inference_mode(mode=False)  # what a head keeps must be fit for training, too
    def bind(self, target: Target) -> None:
        """Bring the head to the target's device, with what it shares with it.

        Raises ValueError as `check` does, and where it was prepared for another target or device.
        """
        self.check(target)
        if isinstance(self.logits, Readout) and self.logits.device != target.device:
            raise ValueError(f"this proposer was prepared for {self.logits.device}, not {target.device}; load it anew")
        self.head.to(target.device)
        before = self.head.borrowed
        if self.head.output != "target" or (before is not None and self._lender is target.model):
            return
        if not isinstance(self.logits, Readout):
            self.head.borrow(target.output_matrix, target.output_bias)
        elif not torch.equal(before, self.head.drafted_rows(target.output_matrix).to(before)):
            raise ValueError("this proposer was prepared for another target, whose output matrix it uses; load it anew")
        self._lender = target.model

    def _pays(self, scores: Tensor) -> bool:
        return True

    @abstractmethod
    def guess(self, features: Tensor, roots: Tensor, target: Target) -> Guesses:
        """What the head says behind last tokens with these features [B, H] and the roots [B] after them."""

    def rehearse(self, features: Tensor, text: Tensor, begin: int, end: int, target: Target) -> Guesses:
        """What the head says behind each of the tokens `begin` to `end - 1` of a text, a row each, as if the text had
        only come that far; the token after it is the root. features [1, T, F] the target's, text [T]."""
        return self.guess(self.ground(features)[0, begin:end], text[begin + 1 : end + 1], target)

    def ground(self, features: Tensor) -> Tensor:
        """What the head makes of all features [B, T, F] of texts, before it guesses from one of them."""
        return features.to(self.dtype)

    def features(self) -> Tensor:
        """The features [B, H] of each row's last committed token."""
        features = self.step.features
        assert features is not None
        return pick_last(features, [len(tokens) for tokens in self.step.committed]).to(self.dtype)


class LevelwiseProposer(HeadProposer):
    """Drafts with a head that runs once a level and looks back on a text's features through a cache of its own.

    Features that it has not run over yet are kept: a step without a draft costs nothing, and nothing is missed.
    """

    def observe(self, step: Step) -> None:
        super().observe(step)
        if step.is_prefill:
            self._cache, self._new = LayerCache(len(step.request_ids)), [list[Tensor]() for _ in step.request_ids]
        elif len(step.kept) < len(self._new):
            self._cache.select(step.kept)
            self._new = [self._new[row] for row in step.kept]
        self._collect(step)

    def _collect(self, step: Step) -> None:
        assert step.features is not None
        for new, features, tokens in zip(self._new, step.features, step.committed, strict=True):
            new.append(features[: len(tokens)])

    def _hand_over(self) -> tuple[Tensor, list[int]]:
        """The features [B, T, H] that were committed since this was last called, padded, and each row's number."""
        new = [torch.cat(parts) for parts in self._new]
        self._new = [[] for _ in new]
        return pad_sequence(new, batch_first=True).to(self.dtype), [len(part) for part in new]

    def _pays(self, scores: Tensor) -> bool:
        """A level is a pass of the head: not where the paths that it would go on from are all but surely wrong."""
        return self.pace.pays(float(scores.exp().sum()) / len(scores))


def in_chunks(counts: Sequence[int]) -> Iterator[tuple[slice, list[int]]]:
    """Rows of `counts` tokens in passes of at most `CHUNK`: the tokens of each pass, and how many of them a row has."""
    for begin in range(0, max(counts), CHUNK):
        yield slice(begin, begin + CHUNK), [min(max(count - begin, 0), CHUNK) for count in counts]


def pick_last(states: Tensor, counts: Sequence[int]) -> Tensor:
    """The states [B, H] of each row's last token, of states [B, T, H] of `counts` tokens a row."""
    last = torch.tensor(counts, device=states.device) - 1
    return states[torch.arange(len(last), device=states.device), last]


def choose_paths(tree: str | Sequence[Ranks], calibration: Calibration | None, static: str) -> tuple[Ranks, ...] | None:
    """The paths of a fixed tree, or None for a dynamic one. Raises ValueError where there is no such tree.

    static: the name of the tree that was published with the method.
    """
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
