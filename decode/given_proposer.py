"""A proposer as users give it: an object, a class of their own, or a name that the installed package loads."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from decode.proposer import PlainProposer, Proposer
from decode.requests.numbers import as_whole
from decode.target import Target
from decode.trees.sampling import Sampling

LOAD_CALL = "load_proposer(name, target)"
HINTS = {  # for a class of one's own
    "layers": "write `layers = ()` in it if it reads no hidden states",
    "propose": "write `def propose(self, step, budget)` in it",
}


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
