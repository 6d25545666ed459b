"""The proposers by name, and what each can be given: checked before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from decode import PlainProposer, Proposer, Target
from decode.models.loading import check_model
from decode.request import read_nodes
from decode.requests.answer import read_count
from heads import KINDS, PRETRAINED, Kind
from heads.checkpoint import find_folder, find_kind
from heads.kinds import add_kind, get_kind
from proposers.dflash import DFlashProposer, FlashMapProposer
from proposers.draft_models.loading import is_trained_draft
from proposers.draft_models.proposer import DraftProposer
from proposers.eagle import EagleProposer, JumpProposer, PEagleProposer
from proposers.head_proposer import HeadProposer
from proposers.medusa import HydraProposer, MedusaProposer, MultiTokenProposer
from proposers.merged import MergedProposer
from proposers.ngram import NGramProposer
from proposers.own_class import find_own, is_own_class
from proposers.sources import AnswerStore, RecyclingSource, SuffixSource

HEAD_PROPOSERS: dict[str, type[HeadProposer]] = {  # by the kind of head
    "medusa": MedusaProposer,
    "multi-token": MultiTokenProposer,
    "hydra": HydraProposer,
    "eagle": EagleProposer,
    "eagle3": EagleProposer,
    "peagle": PEagleProposer,
    "dflash": DFlashProposer,
    "flashmap": FlashMapProposer,
    "jump": JumpProposer,
    "mtp": EagleProposer,
}
SHAPE = "nodes", "depth", "width"
_MERGED = "head", "draft_model", "store", "nodes", "head_window"
TABLE: dict[str, tuple[Callable[..., Proposer], tuple[str, ...]]] = {  # names, and their `DraftingOptions`
    "none": (PlainProposer, ()),
    "ngram": (
        lambda nodes=None: PlainProposer() if nodes == 1 else NGramProposer(length=nodes and nodes - 1),
        ("nodes",),
    ),
    "suffix": (lambda **given: MergedProposer([SuffixSource()], **given), ("store", "nodes")),
    "recycling": (lambda **given: MergedProposer([RecyclingSource()], **given), ("nodes",)),
    "merged": (MergedProposer, _MERGED),
    "draft": (DraftProposer, ("draft_model", "draft_proposer", "sampled", *SHAPE)),
    **{kind: (make, ("head", *make.options)) for kind, make in HEAD_PROPOSERS.items()},
}
OPTIONS = {name: options for name, (_, options) in TABLE.items()} | {"auto": _MERGED}


@dataclass(frozen=True)
class DraftingOptions:
    """What `load_proposer` takes in addition to a name, and the commands as options. None and False are not given."""

    head: str | Path | None = None
    draft_model: Target | str | Path | None = None
    draft_proposer: Proposer | str | Path | None = None
    nodes: int | None = None
    depth: int | None = None
    width: int | None = None
    head_window: int | None = None
    sampled: bool = False
    store: AnswerStore | None = None

    def select(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Those that are given, by name: all, or some of these names."""
        chosen = [each.name for each in fields(self)] if names is None else names
        return {name: value for name in chosen if (value := getattr(self, name)) is not None and value is not False}


def check_options(name: str | Path, options: Mapping[str, Any], *, pretrained: bool = True) -> DraftingOptions:
    """Check what `load_proposer` is given, before anything is loaded. Returns the options.

    options: its keyword arguments by name; None and False are not given. pretrained: whether the target may be the
    default model, which the pretrained heads are for.

    Raises ValueError for an unknown proposer, an option that this proposer does not have, options that exclude each
    other, sizes out of range, and a missing or unknown file, class, head or draft model.
    """
    if unknown := [option for option in options if option not in {each.name for each in fields(DraftingOptions)}]:
        _refuse(str(name), unknown, ())
    chosen = DraftingOptions(**options)
    check_drafting(name, chosen, pretrained)
    if isinstance(chosen.draft_model, str | Path):
        check_model(chosen.draft_model)
    return chosen


def check_drafting(name: str | Path, options: DraftingOptions, pretrained: bool = True) -> None:
    """Like `check_options`, but the draft model is not checked.

    That would fetch its config, and loading it finds the same faults.
    """
    given, kind, is_own = options.select(), str(name), is_own_class(name)
    has: Container[str] = OPTIONS.get(kind, ())
    if is_own and issubclass(find_own(kind), Kind):
        has = ("head", *find_proposer(load_kind(kind).name).options)
        if options.head is None:
            raise ValueError(f"{name} is a kind of head; give head, the folder of one")
    elif name not in OPTIONS and not is_own:
        if not Path(name).is_dir():
            raise ValueError(_explain_unknown(kind))
        if options.head is not None:
            raise ValueError(f"both {str(name)!r} and head name a head; give one")
        is_draft = is_trained_draft(Path(name))
        kind = "draft" if is_draft else find_kind(name)
        has = {*OPTIONS["draft"]} - {"draft_model"} if is_draft else find_proposer(kind).options
    if options.head is not None and options.draft_model is not None:
        raise ValueError("both head and draft_model name a drafter; give one")
    _refuse(kind, given, has)
    _check_sizes(given)
    has_head = options.head is not None or (name == "auto" and options.draft_model is None)
    if options.head_window is not None and name in ("merged", "auto") and not has_head:
        raise ValueError(f"head_window is for a head, and {name} has none here; give head")
    if options.draft_proposer is not None and options.sampled:
        raise ValueError("a draft model with a draft_proposer drafts with the target's noise; leave out sampled")
    if name == "draft" and options.draft_model is None:
        raise ValueError("draft needs draft_model, a smaller model")
    if name in HEAD_PROPOSERS or options.head is not None:
        folder = find_head(kind, options.head)
        if folder is not None and folder.parent == PRETRAINED and not pretrained:
            raise ValueError(f"{name} needs head, the folder of a head that was trained for this model")
        if folder is not None:
            found = find_kind(folder)
            refuse_kind(load_kind(kind).name if is_own else kind, folder, found)
            if options.head_window is not None:
                _refuse(found, ["head_window"], find_proposer(found).options)
    if isinstance(options.draft_proposer, str | Path):
        check_drafting(options.draft_proposer, DraftingOptions(), pretrained)


def find_proposer(kind: str) -> type[HeadProposer]:
    """The class that drafts with heads of this kind."""
    own: type[HeadProposer] | None = get_kind(kind).proposer
    return own or HEAD_PROPOSERS[kind]


def load_kind(name: str) -> Kind:
    """A kind of head of your own, FILE.py:CLASS. Its heads can then be loaded in this process, from any folder.

    Raises ValueError as `find_own` does, and for a class that is no kind of head.
    """
    kind = find_own(name)()
    if not isinstance(kind, Kind):
        raise ValueError(f"{name} is no kind of head: it must be a subclass of heads.Kind")
    add_kind(kind, name)
    return kind


def find_head(name: str, head: str | Path | None) -> Path | None:
    """The folder of a proposer's head; None: it is in the target's own checkpoint. Raises ValueError if there is none.

    head: a folder, or the kind of a pretrained head if there is no such folder; None is the kind `name`.
    """
    kind = None if head is not None and Path(head).is_dir() else KINDS.get(str(head or name))
    if kind is not None and kind.in_checkpoint:
        return None
    return find_folder(str(head) if kind is None else PRETRAINED / kind.name)


def refuse_kind(name: str, folder: Path, kind: str) -> None:
    """Raise ValueError if a proposer of this name is for heads of another kind."""
    if name in KINDS and name != kind:
        raise ValueError(f"the head in {folder} is of kind {kind}, not {name}")


def _refuse(name: str, given: Iterable[str], has: Container[str]) -> None:
    for option in given:
        if option not in has:
            users = ", ".join(user for user, options in OPTIONS.items() if option in options)
            raise ValueError(f"{name} has no option {option}; it is for {users or 'no proposer'}")


def _explain_unknown(name: str) -> str:
    """What is wrong with a name that is neither a proposer's, a folder nor a class of one's own."""
    if name.endswith(".py"):
        return f"{name!r} names a file; name the class too: {name}:CLASS"
    if any(mark in name for mark in (os.sep, os.altsep) if mark):
        return f"there is no folder {name!r}; a head or a draft model is loaded from its folder"
    return f"unknown proposer {name!r}; choose from {', '.join(OPTIONS)}, a head's folder and FILE.py:CLASS"


def _check_sizes(given: Mapping[str, Any]) -> None:
    """Raise ValueError for sizes that are no whole numbers from 1 on."""
    for option in HeadProposer.options:
        try:
            if option in given:
                read_nodes(given[option]) if option == "nodes" else read_count(given[option], option)
        except TypeError as error:
            raise ValueError(str(error)) from error
