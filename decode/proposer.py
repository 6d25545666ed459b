"""The proposer protocol: a proposer gets each finished step and proposes the next draft tree.

Shapes: B rows, N nodes, T committed tokens (padded to the longest row), V vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from traceback import extract_tb
from types import FunctionType, MethodType
from typing import Any, Protocol, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.devices.transfer import Upload, copy_packed
from decode.request import Request
from decode.requests.numbers import as_whole
from decode.target import Target
from decode.trees.sampling import Sampling
from decode.trees.tree import Tree

TREE_CALL = "Tree.chain([[root, draft_token, ...], ...])"


@dataclass
class Step:
    """A batch after a pass: its requests, their verified trees, and what was accepted of them.

    Requests join and leave at any step, so a request's row changes while its request id stays. The last rows take the
    places of those that have left, and requests join after the others. In a request's first step its row commits the
    whole prompt, and its `tree` is the prompt's last token alone.

    Lists have an entry for each of the B rows. N: nodes of the tree; T: committed tokens of the row that has most;
    V: vocabulary; F: feature width.
    target: the model that verifies. requests: each row's request.
    kept: each row's index in the step before; None: its request has just joined.
    committed: the tokens that entered each row's KV cache in this step.
    path: the accepted nodes of each row's verified tree, root first.
    tree: the verified trees.
    logits [B, N, V]: the target's, after each node of the tree.
    features [B, T, F]: the target's hidden states of the committed tokens, as `fuse` reduces them; None if the proposer
    names no layers.
    states [b, N, F]: between two steps, the hidden states of all nodes in the b rows that stay, whose `features` are
    not known yet; None in a step.
    given: tokens that the next pass computes once more before the trees, in the row that has most; 0 unless the target
    has a recurrent state.
    upload: the "roots" [B] on the device, and `list_numbers` if the proposer names layers.
    """

    target: Target
    requests: list[Request]
    kept: list[int | None]
    committed: list[list[int]]
    path: list[list[int]]
    tree: Tree
    logits: Tensor
    features: Tensor | None = None
    states: Tensor | None = None
    given: int = 0
    upload: Upload | None = None

    @property
    def request_ids(self) -> list[int]:
        return [request.request_id for request in self.requests]

    @property
    def sequences(self) -> list[list[int]]:
        """Token ids of each row's prompt and answer so far, bonus token included; read-only."""
        return [request.sequence for request in self.requests]

    @property
    def bonus(self) -> list[int]:
        """Each row's bonus token, the root of the next tree. It is not in the KV cache yet."""
        return [request.sequence[-1] for request in self.requests]

    @property
    def room(self) -> list[int]:
        """How many tokens each row may still get; deeper draft tokens are cut off."""
        return [request.room for request in self.requests]

    @property
    def samplings(self) -> list[Sampling]:
        """How each row's tokens are chosen."""
        return [request.sampling for request in self.requests]

    @property
    def stop_ids(self) -> list[frozenset[int]]:
        """The tokens that end each row's answer."""
        return [request.limits.stop_ids for request in self.requests]

    @property
    def joined(self) -> list[int]:
        """The rows whose requests have just joined: the last ones."""
        return [row for row, place in enumerate(self.kept) if place is None]

    @property
    def stayed(self) -> list[int]:
        """The indices in the step before of the rows that have not just joined: the first ones."""
        return [place for place in self.kept if place is not None]

    @property
    def is_first(self) -> bool:
        """Whether all requests have just joined: what was known of other rows is void."""
        return not self.stayed

    def select(self, rows: Sequence[int]) -> Step:
        """The same for some rows only, those that stayed before those that have joined."""
        stayed = len(self.stayed)
        joined = torch.tensor([row - stayed for row in rows if row >= stayed], dtype=torch.long)
        index = copy_packed({"rows": torch.tensor(rows), "joined": joined}, self.logits.device)
        return replace(
            self,
            requests=[self.requests[row] for row in rows],
            kept=[self.kept[row] for row in rows],
            committed=[self.committed[row] for row in rows],
            path=[self.path[row] for row in rows],
            tree=self.tree.select(index["rows"]),
            logits=self.logits[index["rows"]],
            features=None if self.features is None else self.features[index["joined"]],
            states=None if self.states is None else self.states[index["rows"][: len(rows) - len(joined)]],
        )

    def join(self, other: Step) -> Step:
        """Further rows after the others, of requests that have just joined."""
        return replace(
            self,
            requests=self.requests + other.requests,
            kept=self.kept + other.kept,
            committed=self.committed + other.committed,
            path=self.path + other.path,
            tree=self.tree.join(other.tree),
            logits=join_rows(self.logits, other.logits),
            features=join_rows(self.features, other.features),
        )

    def list_running(self) -> list[int]:
        """The rows of requests that go on. The last ones take the places of others: moving a row takes time."""
        rows, stayed = list[int](), len(self.stayed)
        for part in (range(stayed), range(stayed, len(self.requests))):
            running = [row for row in part if self.requests[row].finish is None]
            late = [row for row in running if row >= part.start + len(running)]
            rows += [row if self.requests[row].finish is None else late.pop() for row in part[: len(running)]]
        return rows


def join_rows(first: Any, second: Any) -> Any:
    """Tensors [B, *, D] of several rows each as one, padded with zeros; either may be None."""
    if first is None or second is None:
        return second if first is None else first
    width = max(first.shape[1], second.shape[1])
    return torch.cat([nn.functional.pad(each, (0, 0, 0, width - each.shape[1])) for each in (first, second)])


class Proposer(Protocol):
    """Anything that drafts. The loop needs these two members only.

    A proposer may keep state between steps, so it serves one stream at a time. It is called in torch's inference mode.
    It may have six more members:
    adaptive: True for trees that are sized by `Target.cost_after`. The loop measures it before the first token, and
    corrects it by what steps take.
    sampled: True if its draft tokens are sampled, so that logits processors see tokens that are rejected later.
    begin(target): checks the target and prepares for it. It is called before the first prompts of a batch are read.
    fuse(features): reduces features from [B, T, F] to [B, T, *]: those of a long prompt and several layers take
    gigabytes. It is called after each forward pass, and steps have the results instead of the features.
    finish(request_id, tokens, accepted): lets the proposer learn from a request's last tree, which no later step has.
    It is called when a request ends after a draft. tokens: the new tokens of the last step; the first `accepted` of
    them are draft tokens.
    credit(request_id, tokens): the name of what drafted each accepted token of a request's last tree. Without it, all
    are credited to the proposer.
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


OPTIONAL: dict[str, Any] = {"adaptive": False, "sampled": False} | dict.fromkeys(("begin", "fuse", "finish", "credit"))
# Who drafts with a proposer, by its id, which its user keeps valid. A proposer serves the one that began last.
_USERS: WeakValueDictionary[int, Drafting] = WeakValueDictionary()


def find_member(proposer: Any, name: str) -> Any:
    """One of the members that a proposer may have (`OPTIONAL`)."""
    return getattr(proposer, name, OPTIONAL[name])


class Drafting:
    """A batch's use of a proposer, which serves one batch at a time: the one that began last.

    layers, adaptive, fuse, finish: the proposer's own. Raises ValueError if it names hidden states that the target does
    not have, and RuntimeError if it is drafting for another batch.
    """

    def __init__(self, proposer: Proposer, target: Target) -> None:
        self.proposer, self.name, self._is_drafting = proposer, type(proposer).__name__, False
        if (other := _USERS.get(id(proposer))) is not None and other._is_drafting:
            self._refuse()
        if (begin := find_member(proposer, "begin")) is not None:
            begin(target)
        self.layers, self.adaptive = proposer.layers, find_member(proposer, "adaptive")
        self.fuse, self.finish = find_member(proposer, "fuse"), find_member(proposer, "finish")
        self._credit = find_member(proposer, "credit")
        last = target.config.num_hidden_layers
        if outside := [layer for layer in self.layers if not -last - 1 <= layer <= last]:
            has = f"{self.name}.layers has {outside[0]}"
            raise ValueError(f"{has}; the target's hidden states are 0 to {last}, which is also -1")
        _USERS[id(proposer)] = self

    def propose(self, step: Step, budget: int) -> Tree:
        """The proposer's trees, whose tensors fit together.

        Raises RuntimeError if another batch has begun to use the proposer, and ValueError for anything but such trees.
        What `propose` itself raises gets a note that names its class and line.
        """
        if _USERS.get(id(self.proposer)) is not self:
            self._refuse()
        self._is_drafting = True
        try:
            tree: Any = self.proposer.propose(step, budget)
        except Exception as error:
            if frames := extract_tb(error.__traceback__)[1:]:
                file, line = Path(frames[0].filename).name, frames[0].lineno
                error.add_note(f"raised in {self.name}.propose ({file}, line {line})")
            raise
        finally:
            self._is_drafting = False
        with self.checking():
            if not isinstance(tree, Tree):
                kind = "None" if tree is None else f"a {type(tree).__name__}"
                raise ValueError(f"{kind}; return a Tree with a row for each request, for example {TREE_CALL}")
            tree.check_shapes(len(step.requests), step.target.vocabulary)
        return tree

    def credit(self, request_id: int, tokens: Sequence[int]) -> list[str]:
        """The name of what drafted each accepted token of a request's last tree."""
        if self._credit is not None:
            found = [*self._credit(request_id, tokens)]
            if len(found) != len(tokens):
                raise ValueError(f"{self.name}.credit returned {len(found)} names for {len(tokens)} tokens")
            return found
        return [self.name.removesuffix("Proposer").lower()] * len(tokens)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Name the proposer in an error that tells what is wrong with its trees."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.name}.propose returned {error}") from error

    def _refuse(self) -> None:
        has = "is used by two streams at once, and it keeps state"
        raise RuntimeError(f"this {self.name} {has}; give each stream its own")


class PlainProposer:
    """Proposes the root alone. This is plain decoding, the baseline of every speed-up."""

    layers: Sequence[int] = ()

    def propose(self, step: Step, budget: int) -> Tree:
        return Tree.chain([[root] for root in step.bonus])


GivenProposer: TypeAlias = Proposer | str | Path | Callable[[Target], Proposer] | None
FUNCTIONS = FunctionType | MethodType | partial
LOAD_CALL = "load_proposer(name, target)"
HINTS = {  # for a class of one's own
    "layers": "write `layers = ()` in it if it reads no hidden states",
    "propose": "write `def propose(self, step, budget)` in it",
}


def check_proposer(proposer: Any) -> None:
    """Raise TypeError, with the right call, for anything but a proposer, a name, a function or None."""
    if isinstance(proposer, FUNCTIONS):
        try:
            signature(proposer).bind(None)
        except TypeError as error:
            raise TypeError(
                f"the proposer is a function that cannot be called with a target; give {LOAD_CALL}"
            ) from error
    if makes_proposers(proposer):
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


def makes_proposers(proposer: Any) -> bool:
    """Whether each target gets a proposer of its own: by a name, by a function, or for None."""
    return proposer is None or isinstance(proposer, str | Path | FUNCTIONS)


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


def as_proposer(proposer: GivenProposer, target: Target) -> Proposer:
    """The proposer itself; for a name or a head's folder, the one that the installed package loads for this target; for
    a function, what it makes for this target.

    A package names its loader as the entry point `load_proposer` in the group "draftless", so that `decode` knows none.
    Raises TypeError, with the right call, if no package does.
    """
    if isinstance(proposer, str | Path):
        for loader in entry_points(group="draftless", name="load_proposer"):
            return loader.load()(proposer, target)
        raise TypeError(f"the proposer is {str(proposer)!r}; give load_proposer({str(proposer)!r}, target)")
    if isinstance(proposer, FUNCTIONS):
        made = proposer(target)
        check_proposer(made)
        return as_proposer(made, target)
    return PlainProposer() if proposer is None else proposer  # type: ignore[return-value]
