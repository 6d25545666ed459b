"""The proposer protocol: a proposer gets each finished step and proposes the next draft tree.

Shapes: B rows, N nodes, T committed tokens (padded to the longest row), V vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from traceback import extract_tb
from typing import Any, ClassVar, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from decode.devices.transfer import Upload
from decode.requests.text import as_whole
from decode.target import Target
from decode.trees.sampling import Sampling
from decode.trees.tree import Tree

LOAD_CALL = "load_proposer(name, target)"
HINTS = {  # for a class of one's own
    "layers": "write `layers = ()` in it if it reads no hidden states",
    "propose": "write `def propose(self, step, budget)` in it",
}
TREE_CALL = "Tree.chain([[root, draft_token, ...], ...])"


@dataclass(frozen=True)
class Step:
    """A verified tree and what was accepted of it, for the rows that go on.

    Requests join and leave at any step, so a request's row changes while its request id stays. The last rows take the
    places of those that have left, and requests join after the others. In a request's first step its row commits the
    whole prompt, and its `tree` is the prompt's last token alone.

    Lists have an entry for each of the B rows. N: nodes of the tree; T: committed tokens of the row that has most;
    V: vocabulary; F: feature width.
    request_ids: each row's request.
    kept: each row's index in the step before; None: its request has just joined.
    sequences: token ids of each row's prompt and answer so far, bonus token included; read-only.
    room: how many tokens each row may still get; deeper draft tokens are cut off.
    committed: the tokens that entered each row's KV cache in this step.
    path: the accepted nodes of each row's verified tree, root first.
    tree: the verified trees.
    logits [B, N, V]: the target's, after each node of the tree.
    features [B, T, F]: the target's hidden states of the committed tokens, as `fuse` reduces them; None if the proposer
    names no layers.
    seconds: spent on verifying and accepting the trees of rows that were there before.
    samplings: how each row's tokens are chosen.
    stop_ids: the tokens that end each row's answer.
    target: the model that verifies.
    given: tokens that the next pass computes once more before the trees, in the row that has most; 0 unless the target
    has a recurrent state.
    upload: the "roots" [B] on the device, and `list_numbers` if the proposer names layers.
    """

    request_ids: list[int]
    kept: list[int | None]
    sequences: list[list[int]]
    room: list[int]
    committed: list[list[int]]
    path: list[list[int]]
    tree: Tree
    logits: Tensor
    features: Tensor | None
    seconds: float
    samplings: list[Sampling]
    stop_ids: list[frozenset[int]]
    target: Target
    given: int = 0
    upload: Upload | None = None

    @property
    def joined(self) -> list[int]:
        """The rows whose requests have just joined: the last ones."""
        return [row for row, place in enumerate(self.kept) if place is None]

    @property
    def is_first(self) -> bool:
        """Whether all requests have just joined: what was known of other rows is void."""
        return len(self.joined) == len(self.kept)

    @property
    def stayed(self) -> list[int]:
        """The indices in the step before of the rows that have not just joined: the first ones."""
        return [place for place in self.kept if place is not None]

    @property
    def bonus(self) -> list[int]:
        """Each row's bonus token, the root of the next tree. It is not in the KV cache yet."""
        return [sequence[-1] for sequence in self.sequences]


class Proposer(Protocol):
    """Anything that drafts. The loop needs these two members only.

    A proposer may keep state between steps, so it serves one stream at a time. It is called in torch's inference mode.
    It may have four more members:
    adaptive: True lets the loop measure `Target.cost_curve` before the first token, for trees that are sized by it.
    begin(target): checks the target and prepares for it. It is called before the first prompts of a batch are read.
    fuse(features): reduces features from [B, T, F] to [B, T, *]: those of a long prompt and several layers take
    gigabytes. It is called after each forward pass, and steps have the results instead of the features.
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
        """The proposer's trees, whose tensors fit together.

        Raises RuntimeError if another stream has begun to use the proposer, and ValueError for anything but such trees.
        What `propose` itself raises gets a note that names its class and line.
        """
        if self._current.get(id(self.proposer)) is not self:
            self._refuse()
        self._is_drafting = True
        try:
            tree: Any = self.proposer.propose(step, budget)
        except Exception as error:
            if frames := extract_tb(error.__traceback__)[1:]:
                file, line = Path(frames[0].filename).name, frames[0].lineno
                error.add_note(f"raised in {type(self.proposer).__name__}.propose ({file}, line {line})")
            raise
        finally:
            self._is_drafting = False
        with self.checking():
            if not isinstance(tree, Tree):
                kind = "None" if tree is None else f"a {type(tree).__name__}"
                raise ValueError(f"{kind}; return a Tree with a row for each request, for example {TREE_CALL}")
            tree.check_shapes(len(step.room), step.target.vocabulary)
        return tree

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Name the proposer in an error that tells what is wrong with its trees."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{type(self.proposer).__name__}.propose returned {error}") from error

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
    if isinstance(proposer, Target | PreTrainedModel):
        raise TypeError('the proposer is a model; give load_proposer("draft", target, draft_model=...)')
    if len(missing) == 1:  # it is meant as a proposer
        name, member = type(proposer).__name__, missing[0]
        raise TypeError(f"{name} has no {member}; {HINTS[member]}")
    if missing:
        call = "sampling=... by name" if isinstance(proposer, Sampling) else LOAD_CALL
        lacks = " and no ".join(missing)
        raise TypeError(f"the proposer is a {type(proposer).__name__}, which has no {lacks}; give {call}")
    _check_members(proposer)


def check_layers(proposer: Proposer, target: Target) -> None:
    """Raise ValueError if a proposer names hidden states that the target does not have."""
    if not proposer.layers:
        return
    last = target.config.num_hidden_layers
    if outside := [layer for layer in proposer.layers if not -last - 1 <= layer <= last]:
        has = f"{type(proposer).__name__}.layers has {outside[0]}"
        raise ValueError(f"{has}; the target's hidden states are 0 to {last}, which is also -1")


def _check_members(proposer: Any) -> None:
    """Raise TypeError if a proposer's `layers` are no numbers, or `propose` cannot be called as the loop calls it."""
    name, layers = type(proposer).__name__, proposer.layers
    if not isinstance(layers, Sequence) or isinstance(layers, str) or None in map(as_whole, layers):
        raise TypeError(f"{name}.layers is {layers!r}; it is a list of numbers of hidden states, or () for none")
    try:
        signature(proposer.propose).bind(None, 1)
    except TypeError as error:
        raise TypeError(f"{name}.propose is called with a step and a budget: propose(step, budget); {error}") from error
    except ValueError:  # a function whose parameters Python does not know
        pass


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
