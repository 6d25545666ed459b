"""The proposer protocol: a proposer gets each finished step and proposes the next draft tree.

Shapes: B rows, N nodes, T committed tokens (padded to the longest row), V vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from decode.gpu.transfer import Upload
from decode.models.stock_model import StockModel
from decode.sampling import Sampling
from decode.target import Target
from decode.tree import Tree

LOAD_CALL = "load_proposer(name, target)"


@dataclass(frozen=True)
class Step:
    """A verified tree and what was accepted of it, for the rows that go on.

    The prefill is the first step of every batch: each row commits its whole prompt, and `tree` is the prompt's last
    token alone. Rows leave the batch as they finish, so a request's row changes while its request id stays.
    """

    is_prefill: bool  # a new batch begins: state of the last one is void
    request_ids: list[int]
    kept: list[int]  # each row's index in the step before
    sequences: list[list[int]]  # prompt and answer so far, bonus token included; read-only
    room: list[int]  # tokens each row may still get; deeper draft tokens are cut off
    committed: list[list[int]]  # tokens that entered the KV cache in this step
    path: list[list[int]]  # accepted nodes of the verified tree, root first
    tree: Tree
    logits: Tensor  # [B, N, V] of the tree
    features: Tensor | None  # [B, T, F] of the committed tokens, if the proposer names layers
    seconds: float  # spent on verifying and accepting the tree
    sampling: Sampling
    stop_ids: frozenset[int]  # tokens that end an answer
    target: Target
    upload: Upload | None = None  # holds `list_numbers` on the device, if the proposer names layers
    is_fused: bool = False  # the features are what the proposer's `fuse` has made of them

    @property
    def bonus(self) -> list[int]:
        """Each row's bonus token, the root of the next tree. It is not in the KV cache yet."""
        return [sequence[-1] for sequence in self.sequences]


class Proposer(Protocol):
    """Anything that drafts. The loop needs these two members only.

    A proposer may keep state between steps, so it serves one stream at a time. It is called in torch's inference mode.
    It may have three more members:
    adaptive: True lets the loop measure `Target.cost_curve` before the first token, for trees that are sized by it.
    fuse(target, features): reduces a prompt's features from [B, T, F] to [B, T, *], to save memory: those of a long
    prompt and several layers take gigabytes. It is called after each forward pass over a part of the prompt, and the
    prefill's step has the results instead of the features.
    finish(request_id, tokens, accepted): lets the proposer learn from a request's last tree, which no later step has.
    It is called when a request ends after a draft. tokens: the new tokens of the last step; the first `accepted` of
    them are draft tokens.
    """

    @property
    def layers(self) -> Sequence[int]:
        """The hidden states of the target that it needs as features, in transformers' numbering; () for none."""
        ...

    def propose(self, step: Step, budget: int) -> Tree:
        """A draft tree per row, with at most `budget` nodes and the row's bonus token as its root.

        Called exactly once a step. Nodes at depth `step.room` or deeper are cut off before the tree is verified, the
        others keep their order, and the next step carries the tree as it was verified.
        """
        ...


class Use:
    """A stream's use of a proposer, which serves one stream at a time. The stream that began last has it."""

    _current: ClassVar[dict[int, Use]] = {}  # by the proposer's id; the use keeps it alive

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self._is_drafting = proposer, False
        other = self._current.get(id(proposer))
        if other is not None and other._is_drafting:
            self._refuse()
        self._current[id(proposer)] = self

    def propose(self, step: Step, budget: int) -> Tree:
        """The proposer's trees. Raises RuntimeError if another stream has begun to use the proposer."""
        if self._current.get(id(self.proposer)) is not self:
            self._refuse()
        self._is_drafting = True
        try:
            return self.proposer.propose(step, budget)
        finally:
            self._is_drafting = False

    def end(self) -> None:
        if self._current.get(id(self.proposer)) is self:
            del self._current[id(self.proposer)]

    def _refuse(self) -> None:
        name = type(self.proposer).__name__
        raise RuntimeError(f"this {name} is used by two streams at once, and it keeps state; give each stream its own")


def check_proposer(proposer: Any) -> None:
    """Raise TypeError, with the right call, for anything but a proposer, a name or None."""
    if proposer is None or isinstance(proposer, str | Path):
        return
    missing = [name for name in ("layers", "propose") if not hasattr(proposer, name)]
    if isinstance(proposer, type):
        required = [each.name for each in signature(proposer).parameters.values() if each.default is each.empty]
        call = f"{proposer.__name__}({', '.join(required)})" if "propose" not in missing else LOAD_CALL
        raise TypeError(f"the proposer is the class {proposer.__name__}, not an instance; give {call}")
    if isinstance(proposer, StockModel | PreTrainedModel):
        raise TypeError('the proposer is a model; give load_proposer("draft", target, draft_model=...)')
    if missing:
        call = "sampling=... by name" if isinstance(proposer, Sampling) else LOAD_CALL
        lacks = " and no ".join(missing)
        raise TypeError(f"the proposer is a {type(proposer).__name__}, which has no {lacks}; give {call}")


def as_proposer(proposer: Proposer | str | Path | None, target: Target) -> Proposer:
    """The proposer itself; for a name or a head's folder, the one that the installed package loads for this target.

    A package names its loader as the entry point `load_proposer` in the group "draftless", so that `decode` knows none.
    Raises TypeError, with the right call, if no package does.
    """
    if isinstance(proposer, str | Path):
        for loader in entry_points(group="draftless", name="load_proposer"):
            return loader.load()(proposer, target)
        raise TypeError(f"the proposer is {str(proposer)!r}; give load_proposer({str(proposer)!r}, target)")
    return PlainProposer() if proposer is None else proposer


class PlainProposer:
    """Proposes the root alone. This is plain decoding, the baseline of every speed-up."""

    layers: Sequence[int] = ()

    def propose(self, step: Step, budget: int) -> Tree:
        return Tree.chain([[root] for root in step.bonus])
