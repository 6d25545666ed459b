"""Drafting with a trained head: what all kinds of heads share.

Shapes: B rows, T tokens, F feature width, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, ClassVar, Self
from weakref import finalize, ref

import torch
from torch import Tensor

from decode import Sampling, Step, Target
from decode.devices.backend import find_backend
from decode.trees.sampling import group_rows
from heads.layer_cache import LayerCache
from heads.vocabulary import VocabularyHead
from proposers.calibration import LARGEST, Calibration
from proposers.draft_budget import DraftBudget
from proposers.fast_heads import DraftGraphs, pack_head, pack_outputs
from proposers.feature_history import FeatureHistory, FeaturePart, ReadFeatures, pick_last
from proposers.search import RANKS, Draft, Drafter
from proposers.tree_proposer import Find, Inputs, TreeProposer

READ_A_LEVEL, KEYS_A_LEVEL = 32, 128  # tokens that a head reads in the time of a level: whole, or keys and values alone


def _put_back(spare: list[tuple[FeatureHistory, DraftGraphs]], history: FeatureHistory, graphs: DraftGraphs) -> None:
    history.drop_unread()
    spare.append((history, graphs))


class HeadProposer(TreeProposer):
    """Drafts trees with a trained head.

    depth: how many levels a tree has at most. None takes as many as the method has.
    width: how broad a tree is: the paths that are followed at each level, and the next tokens of each path. 1 drafts a
    chain. None takes the method's width.
    nodes, calibration: see `TreeProposer`.
    head_window: how many tokens the head attends to at most; None: as many as it was trained to.

    Raises ValueError for an impossible size, for a calibration of another head, and, in its first step, for a
    head that was trained for another target.
    """

    options: ClassVar[tuple[str, ...]] = ("nodes", "depth", "width", "head_window")  # of `load_proposer`
    levels: ClassVar[int | None] = None  # of a tree at most; None: one for each head
    usual_width: ClassVar[int]
    usual_ranks: ClassVar[int] = RANKS
    seen_slots = 0, 0  # of the head's cache, that the next draft sees, see `find_window`

    def __init__(
        self,
        head: VocabularyHead,
        *,
        depth: int | None = None,
        width: int | None = None,
        nodes: int | None = None,
        calibration: Calibration | None = None,
        head_window: int | None = None,
    ) -> None:
        self.head: Any = head
        self.head_window = head_window
        heads = self.levels or self.head.config.heads
        self.most_ranks = getattr(head.config, "candidates", 0) or head.vocab_size  # next tokens that a path has
        super().__init__(
            depth=heads if depth is None else depth,
            width=self.usual_width if width is None else width,
            ranks=min(self.usual_ranks if width is None else width, self.most_ranks),
            nodes=nodes,
            calibration=calibration,
        )
        if head_window is not None and head_window < self.depth:
            raise ValueError(f"head_window is {head_window}; a draft of {self.depth} tokens needs at least as many")
        if self.levels is None and self.depth > heads:
            raise ValueError(f"depth is {self.depth}; this head drafts {heads} levels")
        if calibration is not None and self.levels is None and len(calibration.acceptance) != heads:
            raise ValueError(f"the calibration is of {len(calibration.acceptance)} heads, not of {heads}")
        self.dtype = next(head.parameters()).dtype
        self.layers = tuple(self.head.features)
        if calibration is not None:
            self.draft_budget = DraftBudget(calibration.expect_tau(LARGEST))
        self._history = FeatureHistory(min(filter(None, (head.window, head_window)), default=None))
        # The model whose output matrix the head uses, if it has no own, and what tells the version of its weights.
        self._borrowed_from: tuple[ref[Any], ref[Any], str | None, int] | None = None
        self._graphs = DraftGraphs()
        self._spare: list[tuple[FeatureHistory, DraftGraphs]] = []  # of renewed proposers that are gone, on a GPU
        self._prepared_for: torch.device | None = None  # where its packed layers run

    @property
    def name(self) -> str:
        return str(self.head.kind)

    @property
    def token_map(self) -> Tensor | None:
        found: Tensor | None = self.head.token_map
        return found

    @property
    def reads_keys_alone(self) -> bool:
        """Whether it reads features whose states nobody needs in less time, see `read_features`."""
        return False

    @property
    def unread(self) -> float:
        counts, at_once = self._history.unread_counts, KEYS_A_LEVEL if self.reads_keys_alone else READ_A_LEVEL
        return sum(counts) / len(counts) / at_once if counts else 0.0

    def renew(self) -> Self:
        """See `TreeProposer`. On a GPU, graphs and the cache that they write to go on to the next one."""
        fresh = super().renew()
        try:
            fresh._history, fresh._graphs = self._spare.pop()
        except IndexError:
            fresh._history, fresh._graphs = FeatureHistory(self._history.window), DraftGraphs()
        device = self._prepared_for or next((each.device for each in self.head.parameters()), None)
        if device is not None and find_backend(device).waits:
            finalize(fresh, _put_back, self._spare, fresh._history, fresh._graphs)
        return fresh

    def prepare(self, target: Target) -> Self:
        """Draft with a faster copy of the head (`proposers.fast_heads`), bound to the target. Returns itself."""
        self.begin(target)
        if not self.head.outputs:
            self.head, self._prepared_for = pack_head(self.head), target.device
            self._graphs.forget()
        return self

    def check(self, target: Target) -> None:
        """Raise ValueError if the head was trained for another target."""
        self.head.check_target(target.config.hidden_size, target.vocabulary, target.config.num_hidden_layers)

    @torch.inference_mode(mode=False)  # the head may be trained later, with what it borrows here
    def begin(self, target: Target) -> None:
        """Make the head ready: on the target's device, with the target's output matrix if it has none of its own.

        If the target's weights have changed, it takes the new matrix. Raises ValueError as `check` does, and if it was
        prepared for another target or device.
        """
        self.check(target)
        if self._prepared_for not in (None, target.device):
            raise ValueError(f"this proposer was prepared for {self._prepared_for}, not {target.device}; load it again")
        self.head.to(target.device)
        head, before = self.head, self._borrowed_from
        now = ref(target.given_model or target.model), ref(target.watch), target.adapter, target.read_version()
        if head.output != "target" or (head.borrowed is not None and before == now):
            return
        matrix = target.output_matrix
        if not head.outputs or (before is not None and before[0] == now[0]):  # new, or the same model has changed
            head.borrow(matrix, target.output_bias)
            self._graphs.forget()  # they read the matrix before
            if head.outputs:
                head.outputs = pack_outputs(head)
        elif not torch.equal(head.borrowed, head.drafted_rows(matrix).to(head.borrowed)):
            raise ValueError("this proposer was prepared for another target's output matrix; load it again")
        self._borrowed_from = now

    @torch.no_grad()
    def observe(self, step: Step) -> None:
        if self.head.reads_all_features:
            self._history.add(step, self.reader(step))

    @torch.no_grad()
    def fuse(self, features: Tensor) -> Tensor:
        """The features [B, T, F] as the head's layers read them. See `decode.Proposer`."""
        fused: Tensor = self.head.fuse(features.to(self.dtype))
        return fused

    def reader(self, step: Step) -> ReadFeatures:
        """`read_features` for a step."""
        return partial(self.read_features, step.target)

    def read_features(self, target: Target, cache: LayerCache, part: FeaturePart, keys_alone: bool = False) -> Tensor:
        """Let a head that attends to features read some. Returns its states [B, T, H] after them.

        keys_alone: nobody needs the states; what is returned may be anything. Here for heads that never have any: the
        features themselves.
        """
        features = part.features.to(self.dtype)
        cache.write(*self.head.read(features, cache.positions(features.shape[1], features.device)))
        cache.keep(part.counts, part.counts_tensor)
        return features

    def read_step(self, step: Step) -> Inputs:
        """See `TreeProposer`. Here each row's last feature, or the head's last state if it attends to features."""
        if self.head.reads_all_features:
            return {"last": self._history.read_all(self.reader(step), self.reads_keys_alone)}
        assert step.features is not None and step.upload is not None
        return {"last": pick_last(step.features, step.upload["counts"]).to(self.dtype)}

    def start_along(self, target: Target, features: Tensor, text: Tensor, begin: int, end: int) -> Drafter:
        """A drafter with a row for each position from `begin` to `end - 1`, as if the text ended there with its root.

        features [1, N, F]: the target's; text [N]. The root is the token after the position.
        """
        inputs = self.read_along(target, features.to(self.dtype), text, begin, end)
        return self.start_drafter(inputs | {"roots": text[begin + 1 : end + 1]}, target)

    def read_along(self, target: Target, features: Tensor, text: Tensor, begin: int, end: int) -> Inputs:
        """As `read_step`, for the rows of `start_along`: each attends to its part of the text."""
        if not self.head.reads_all_features:
            return {"last": features[0, begin:end]}
        cache, count = self._history.make_cache(1), torch.tensor([end], device=text.device)
        part = FeaturePart(self.head.fuse(features[:, :end]), text[None, 1 : end + 1], count, [end])
        states = self.read_features(target, cache, part)
        cache.select([0] * (end - begin))
        cache.crop(range(begin + 1, end + 1))
        self._history.cache = cache
        return {"last": states[0, begin:end]}

    def run(self, find: Find, inputs: Inputs, target: Target, samplings: Sequence[Sampling], sizes: Hashable) -> Draft:
        if not target.has_graphs or not self.is_fixed(inputs) or len(group_rows(samplings)) > 1:
            return find(inputs)
        return self._graphs.run(target.model, self.written, (sizes, samplings[0].kind, self.seen_slots), find, inputs)

    def embedding(self, target: Target) -> Callable[[Tensor], Tensor]:
        """A function from tokens [...] to the embeddings [..., H] that the head reads: its own, or the target's."""
        embed: Any = self.head.embed_tokens or target.model.get_input_embeddings()
        return lambda tokens: embed(tokens).to(self.dtype)

    def is_fixed(self, inputs: Inputs) -> bool:
        """Whether drafting from these inputs can be a CUDA graph: the same tensor operations in every step."""
        return True

    @property
    def written(self) -> Tensor | None:
        """The keys of the cache that drafting writes to, if there is one."""
        return None
