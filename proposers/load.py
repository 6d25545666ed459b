"""Load a proposer by its name, from a trained head's folder, or from a class of one's own in a Python file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.utils import cached_file

from decode import PlainProposer, Proposer, Target
from decode.models.loading import check_model
from decode.request import read_nodes
from decode.requests.answer import read_count
from decode.requests.arguments import naming_arguments
from decode.target import check_target
from heads import PRETRAINED
from heads.checkpoint import find_folder, find_kind, is_saved_head, load_head
from heads.formats.layout import Head
from proposers.calibration import load_calibration
from proposers.dflash import DFlashProposer
from proposers.draft_models.loading import is_trained_draft, load_draft_model
from proposers.draft_models.proposer import DraftProposer
from proposers.draft_models.staged import StagedProposer
from proposers.eagle import EagleProposer, MtpProposer, PEagleProposer
from proposers.head_proposer import HeadProposer
from proposers.medusa import HydraProposer, MedusaProposer, MultiTokenProposer
from proposers.merged import LookaheadProposer, MergedProposer, RecyclingProposer, SuffixProposer
from proposers.ngram import NGramProposer
from proposers.own_class import find_own, is_own_class, load_own
from proposers.sources import AnswerStore
from proposers.tree_proposer import TreeProposer

_MERGED, _TRAINED, _SHAPE = ("head", "draft_model", "store", "nodes"), ("head", "nodes"), ("depth", "width")
_TABLE: dict[str, tuple[Callable[..., Proposer], tuple[str, ...]]] = {  # names, and options of `load_proposer`
    "none": (PlainProposer, ()),
    "ngram": (NGramProposer, ()),
    "suffix": (SuffixProposer, ("store", "nodes")),
    "recycling": (RecyclingProposer, ("nodes",)),
    "lookahead": (LookaheadProposer, ("nodes",)),
    "merged": (MergedProposer, _MERGED),
    "draft": (DraftProposer, ("draft_model", "draft_layers", "draft_proposer", "sampled", "nodes", *_SHAPE)),
    "medusa": (MedusaProposer, _TRAINED),
    "multi-token": (MultiTokenProposer, _TRAINED),
    "hydra": (HydraProposer, _TRAINED),
    "eagle": (EagleProposer, (*_TRAINED, *_SHAPE)),
    "eagle3": (EagleProposer, (*_TRAINED, *_SHAPE)),
    "peagle": (PEagleProposer, (*_TRAINED, *_SHAPE)),
    "dflash": (DFlashProposer, (*_TRAINED, *_SHAPE)),
    "mtp": (MtpProposer, (*_TRAINED, *_SHAPE)),
}
OPTIONS = {name: options for name, (_, options) in _TABLE.items()} | {"auto": _MERGED}
HEAD_PROPOSERS: dict[str, type[HeadProposer]] = {
    name: make for name, (make, _) in _TABLE.items() if isinstance(make, type) and issubclass(make, HeadProposer)
}
# The pretrained head that makes merged trees fastest (docs/performance.md), by the fingerprint of its target's weights.
FASTEST = {"210dbf7a38725ae1": "eagle"}

# What `find_pretrained` has loaded, by the model and its place and format. A target is made anew in each `speculate`.
_loaded: WeakKeyDictionary[PreTrainedModel, dict[Any, HeadProposer | None]] = WeakKeyDictionary()


@naming_arguments("load_proposer")
def load_proposer(
    name: str | Path,
    target: Target,
    *,
    head: str | Path | None = None,
    draft_model: Target | str | Path | None = None,
    draft_layers: int | None = None,
    draft_proposer: Proposer | str | Path | None = None,
    nodes: int | None = None,
    depth: int | None = None,
    width: int | None = None,
    sampled: bool = False,
    store: AnswerStore | None = None,
) -> Proposer:
    """A proposer that is ready for this target.

    name: a key of `OPTIONS`, the folder of a head or a draft model, or a class of your own as "FILE.py:CLASS", which is
    called without arguments. "auto" is "merged" with the pretrained head for this target's weights, or without a head
    if there is none.
    head: the folder of a trained head, or the kind of a pretrained one, such as "hydra". None takes the pretrained head
    of the kind that `name` is; for "mtp", the module in the target's checkpoint. "merged" then has no head.
    draft_model: for "draft", and for "merged" instead of a head: a target, or a folder or hub id to load.
    draft_layers: for "draft": only the first layers of the model to load; without draft_model, of the target's.
    store: finished answers to draft from, see `MergedProposer`.
    draft_proposer: for "draft": what drafts for the draft model (`StagedProposer`): a proposer, or a name or folder as
    `name` is.
    nodes, depth, width: see `TreeProposer`. sampled: see `DraftProposer`.

    Raises ValueError as `check_options` does, for a class that is no proposer, and for a head of another kind or for
    another target; TypeError unless `target` is a target.
    """
    check_target(target, name, "load_proposer({}, target)")
    options: dict[str, Any] = {"head": head, "draft_model": draft_model, "nodes": nodes, "store": store}
    options |= {
        "draft_layers": draft_layers,
        "draft_proposer": draft_proposer,
        "depth": depth,
        "width": width,
        "sampled": sampled,
    }
    given = _check_options(name, options)
    if is_own_class(name):
        return load_own(str(name))
    if name not in OPTIONS and is_trained_draft(Path(name)):
        return _load_draft_proposer(target, name, **given)
    if name not in OPTIONS:
        return _load_head_proposer(None, Path(name), target, **given)
    chosen, model = given.pop("head", None), given.pop("draft_model", None)
    if _names_own_module(name, chosen):
        chosen = find_checkpoint(target)
    if name in HEAD_PROPOSERS:
        return _load_head_proposer(str(name), find_head(str(name), chosen), target, **given)
    if name == "draft":
        return _load_draft_proposer(target, model, **given)
    if name in ("merged", "auto"):
        drafter: TreeProposer | None = None
        if model is not None:
            drafter = _load_draft_proposer(target, model)  # type: ignore[assignment]  # without a proposer of its own
        elif chosen is not None:
            drafter = _load_head_proposer(None, find_head(str(name), chosen), target)
        elif name == "auto":
            drafter = find_pretrained(target)
        return MergedProposer(drafter=drafter, **given)
    return _TABLE[str(name)][0](**given)


def check_options(name: str | Path, options: Mapping[str, Any], *, pretrained: bool = True) -> dict[str, Any]:
    """Check what `load_proposer` is given, before anything is loaded. Returns the options that are given.

    options: its keyword arguments by name; None and False are not given. pretrained: whether the target may be the
    default model, which the pretrained heads are for.

    Raises ValueError for an unknown proposer, an option that this proposer does not have, options that exclude each
    other, sizes out of range, and a missing or unknown file, class, head or draft model.
    """
    given = _check_options(name, options, pretrained)
    if isinstance(given.get("draft_model"), str | Path):
        check_model(given["draft_model"])
    return given


def _check_options(name: str | Path, options: Mapping[str, Any], pretrained: bool = True) -> dict[str, Any]:
    """Like `check_options`, but the draft model is not checked.

    That would fetch its config, and loading it finds the same faults.
    """
    given = {option: value for option, value in options.items() if value is not None and value is not False}
    is_folder = name not in OPTIONS and Path(name).is_dir()
    if is_own_class(name):
        find_own(str(name))
    elif not is_folder and name not in OPTIONS:
        raise ValueError(_explain_unknown(str(name)))
    if "head" in given and "draft_model" in given:
        raise ValueError("both head and draft_model name a drafter; give one")
    if is_folder and "head" in given:
        raise ValueError(f"both {str(name)!r} and head name a head; give one")
    kind, has = str(name), OPTIONS.get(str(name), ())
    if is_folder and is_trained_draft(Path(name)):
        has = tuple({*OPTIONS["draft"]} - {"draft_model", "draft_layers"})
    elif is_folder:
        kind = find_kind(name)
        has = tuple({*OPTIONS[kind]} - {"head"})
    _refuse_options(kind, given, has)
    _check_sizes(given)
    if "draft_proposer" in given and "sampled" in given:
        raise ValueError("a draft model with a draft_proposer drafts with the target's noise; leave out sampled")
    if name == "draft" and not {"draft_model", "draft_layers"} & {*given}:
        raise ValueError("draft needs draft_model, a smaller model, or draft_layers, how many of the target's draft")
    if (name in HEAD_PROPOSERS or "head" in given) and not _names_own_module(name, given.get("head")):
        folder = find_head(str(name), options.get("head"))
        if folder.parent == PRETRAINED and not pretrained:
            raise ValueError(f"{name} needs head, the folder of a head that was trained for this model")
        _refuse_kind(str(name), folder, find_kind(folder))
    if isinstance(given.get("draft_proposer"), str | Path):
        _check_options(given["draft_proposer"], {}, pretrained)
    return given


def _explain_unknown(name: str) -> str:
    """What is wrong with a name that is neither a proposer's, a folder nor a class of one's own."""
    if name.endswith(".py"):
        return f"{name!r} names a file; name the class too: {name}:CLASS"
    if any(mark in name for mark in (os.sep, os.altsep) if mark):
        return f"there is no folder {name!r}; a head or a draft model is loaded from its folder"
    return f"unknown proposer {name!r}; choose from {', '.join(OPTIONS)}, a head's folder and FILE.py:CLASS"


def _check_sizes(given: Mapping[str, Any]) -> None:
    """Raise ValueError for sizes that are no whole numbers from 1 on."""
    for option in ("nodes", "depth", "width", "draft_layers"):
        try:
            if option in given:
                read_nodes(given[option]) if option == "nodes" else read_count(given[option], option)
        except TypeError as error:
            raise ValueError(str(error)) from error


def _refuse_kind(name: str, folder: Path, kind: str) -> None:
    """Raise ValueError if a proposer of this name is for heads of another kind."""
    if name in HEAD_PROPOSERS and name != kind:
        raise ValueError(f"the head in {folder} is of kind {kind}, not {name}")


def _refuse_options(name: str, given: Iterable[str], has: Container[str]) -> None:
    for option in given:
        if option not in has:
            users = ", ".join(user for user, options in OPTIONS.items() if option in options)
            raise ValueError(f"{name} has no option {option}; it is for {users}")


def find_head(name: str, head: str | Path | None) -> Path:
    """The folder of a proposer's head. Raises ValueError if there is none.

    head: a folder, or the kind of a pretrained head if there is no such folder; None is the kind `name`.
    """
    is_kind = head is None or (head in HEAD_PROPOSERS and not Path(head).is_dir())
    return find_folder(PRETRAINED / (head or name) if is_kind else str(head))


def _names_own_module(name: str | Path, head: str | Path | None) -> bool:
    """Whether the head is the MTP module in the target's own checkpoint."""
    return "mtp" in (name, head) and head in (None, "mtp") and not (head and Path(head).is_dir())


def find_checkpoint(target: Target) -> Path:
    """The local folder of the target's own checkpoint. Raises ValueError if it is not there."""
    name = str(target.model.name_or_path or "")
    if name and Path(name).is_dir():
        return Path(name)
    try:
        revision = getattr(target.model.config, "_commit_hash", None)
        return Path(cached_file(name, "config.json", revision=revision, local_files_only=True)).parent
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            "mtp needs head, the folder of a checkpoint with an MTP module (no GGUF file has one): the target's own "
            + (f"is not found ({name})" if name else "is not known")
        ) from error


def find_pretrained(target: Target) -> HeadProposer | None:
    """A proposer with the pretrained head for this target's weights; None if there is none.

    The head is loaded at the first call and kept as long as the model.
    """
    loaded, key = _loaded.setdefault(target.model, {}), (target.device, target.dtype)
    if key not in loaded:
        kind = FASTEST.get(target.weights_fingerprint or "")
        folder = PRETRAINED / str(kind)
        loaded[key] = _load_head_proposer(kind, folder, target) if kind and folder.is_dir() else None
    kept = loaded[key]
    return kept and kept.renew()


def _load_head_proposer(kind: str | None, folder: Path, target: Target, **options: Any) -> HeadProposer:
    """A proposer with the head in a folder, of this kind if one is named.

    Raises ValueError for options that the head does not have, and for a head of another kind or for another target.
    """
    try:
        head = _load_fitting_head(kind, folder, target)
    except ValueError as error:
        if folder.parent != PRETRAINED:
            raise
        raise ValueError(
            f"the pretrained {folder.name} head is for the default model ({error}); pass a head that was trained for "
            'this target: head="FOLDER"'
        ) from error
    _refuse_options(head.kind, options, OPTIONS[head.kind])
    # In the checkpoint of a model, it is that of the model as a draft.
    calibration = load_calibration(folder) if head.kind != "mtp" or is_saved_head(folder) else None
    proposer = HEAD_PROPOSERS[head.kind](head, calibration=calibration, **options).prepare(target)
    _warn_of_weights(str(folder), head.config.target_weights, target)
    return proposer


def _load_draft_proposer(
    target: Target,
    draft_model: Target | str | Path | None,
    draft_layers: int | None = None,
    draft_proposer: Proposer | str | Path | None = None,
    **options: Any,
) -> DraftProposer | StagedProposer:
    """A proposer with a draft model, calibrated if its folder has a calibration."""
    if not isinstance(draft_model, Target):
        name = str(target.model.name_or_path if draft_model is None else draft_model)
        if not name:
            raise ValueError(
                "draft_layers needs the name of a model to load, and this target has none; give draft_model"
            )
        placed: dict[str, Any] = {"dtype": target.dtype, "device": str(target.device)}
        draft_model = load_draft_model(name, layers=draft_layers, whole=draft_proposer is not None, **placed)
    elif draft_layers is not None:
        raise ValueError("draft_layers is for a model to load, and draft_model is loaded already; give its name")
    folder = str(draft_model.model.name_or_path)
    proposer: DraftProposer | StagedProposer
    if draft_proposer is None:
        calibration = load_calibration(folder) if folder and draft_layers is None else None
        proposer = DraftProposer(draft_model, calibration=calibration, **options)
    else:
        if isinstance(draft_proposer, str | Path):
            draft_proposer = load_proposer(draft_proposer, draft_model)
        proposer = StagedProposer(draft_model, draft_proposer, **options)
    proposer.begin(target)
    _warn_of_weights(folder, getattr(draft_model.model.config, "target_weights", None), target)
    return proposer


def load_draft_head(folder: Path | str, target: Target) -> Head:
    """The head in a folder, in the dtype in which it should draft for this target. Errors as in `load_head`.

    Drafting takes as long as reading the weights. So it is bfloat16 for a float32 target on a CPU with fast bfloat16,
    else the target's dtype. Raises ValueError if the head was trained for another target, and warns if that had other
    weights of the same sizes.
    """
    head = _load_fitting_head(None, Path(folder), target)
    _warn_of_weights(str(folder), head.config.target_weights, target)
    return head


def _load_fitting_head(kind: str | None, folder: Path, target: Target) -> Head:
    """`load_draft_head` without the warning, which would contradict an error that comes later."""
    halve = target.dtype == torch.float32 and not target.backend.waits and target.backend.is_fast_in_bfloat16
    dtype = torch.bfloat16 if halve else target.dtype
    head = load_head(folder, dtype, target.vocabulary, target.config.num_hidden_layers)
    _refuse_kind(str(kind), folder, head.kind)
    HEAD_PROPOSERS[head.kind](head).check(target)
    share_matrices(head, target)
    return head


def share_matrices(head: Head, target: Target) -> None:
    """Let a head use the target's embeddings and output matrix where its own are copies of them.

    The head's code looks up the rows of its own embeddings. So in a target that scales its embeddings, such as Gemma, a
    copy is equal to the scaled rows; only block heads, which have a scale of their own, read the raw ones.
    """
    embeddings = output = None
    if head.embed_tokens is not None:
        embeddings = target.embedding_matrix
        if head.kind != "dflash" and target.embedding_scale != 1:
            embeddings = embeddings * target.embedding_scale
    if head.output == "shared" and head.kind in ("eagle", "mtp") and target.output_bias is None:  # others train theirs
        with suppress(ValueError):  # it has no dense one
            output = target.output_matrix
    head.share(embeddings, output)


def _warn_of_weights(folder: str, trained: str | None, target: Target) -> None:
    """Warn if what drafts was trained for another target, by the fingerprint of its weights."""
    given = target.weights_fingerprint
    if None not in (trained, given) and trained != given:
        warnings.warn(
            f"{folder!r} was trained for a model with other weights than this target's; the text stays the same, but "
            "fewer draft tokens may be accepted",
            stacklevel=3,
        )
