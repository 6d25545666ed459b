"""Load a proposer by its name, from a trained head's folder, or from a class of one's own in a Python file."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel
from transformers.utils import cached_file

from decode import Proposer, Target
from decode.arguments import naming_arguments
from decode.target import check_target
from heads import PRETRAINED
from heads.checkpoint import find_folder, is_saved_head, load_head
from heads.kinds import KINDS, Kind
from heads.vocabulary import VocabularyHead
from proposers.calibration import load_calibration
from proposers.draft_models.loading import is_trained_draft, load_draft_model
from proposers.draft_models.proposer import DraftProposer
from proposers.draft_models.staged import StagedProposer
from proposers.head_proposer import HeadProposer
from proposers.merged import MergedProposer
from proposers.options import (
    HEAD_PROPOSERS,
    OPTIONS,
    SHAPE,
    TABLE,
    DraftingOptions,
    check_drafting,
    find_head,
    find_proposer,
    load_kind,
    refuse_kind,
)
from proposers.own_class import find_own, is_own_class, load_own
from proposers.sources import AnswerStore
from proposers.tree_proposer import TreeProposer

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
    draft_proposer: Proposer | str | Path | None = None,
    nodes: int | None = None,
    depth: int | None = None,
    width: int | None = None,
    head_window: int | None = None,
    sampled: bool = False,
    store: AnswerStore | None = None,
) -> Proposer:
    """A proposer that is ready for this target.

    name: a key of `OPTIONS`, the folder of a head or a draft model, or a class of your own as "FILE.py:CLASS": a
    proposer, which is called without arguments, or a kind of head. "auto" is "merged" with the pretrained head for this
    target's weights, or without a head if there is none.
    head: the folder of a trained head, or the kind of a pretrained one, such as "hydra". None takes the pretrained head
    of the kind that `name` is; for "mtp", the module in the target's checkpoint. "merged" then has no head.
    draft_model: for "draft", and for "merged" instead of a head: a target, or a folder or hub id to load.
    store: finished answers to draft from, see `MergedProposer`.
    draft_proposer: for "draft": what drafts for the draft model (`StagedProposer`): a proposer, or a name or folder as
    `name` is.
    nodes, depth, width: see `TreeProposer`. head_window: see `HeadProposer`. sampled: see `DraftProposer`.

    Raises ValueError as `check_options` does, for a class that is no proposer, and for a head of another kind or for
    another target; TypeError unless `target` is a target.
    """
    check_target(target, name, "load_proposer({}, target)")
    options = DraftingOptions(head, draft_model, draft_proposer, nodes, depth, width, head_window, sampled, store)
    check_drafting(name, options)
    shape = options.select(HeadProposer.options)
    if is_own_class(name):
        if not issubclass(find_own(str(name)), Kind):
            return load_own(str(name))
        return _load_head_proposer(load_kind(str(name)).name, find_folder(str(head)), target, **shape)
    if name not in OPTIONS and not is_trained_draft(Path(name)):
        return _load_head_proposer(None, Path(name), target, **shape)
    if name == "draft" or name not in OPTIONS:
        return _load_draft_proposer(target, name if draft_model is None else draft_model, options)
    if name in HEAD_PROPOSERS:
        return _load_head_proposer(str(name), find_head(str(name), head) or find_checkpoint(target), target, **shape)
    make, has = TABLE["merged" if name == "auto" else str(name)]
    given = options.select({*has} - {"head", "draft_model", "head_window"})
    return make(**given, **({"drafter": _load_drafter(str(name), target, options)} if make is MergedProposer else {}))


def _load_drafter(name: str, target: Target, options: DraftingOptions) -> TreeProposer | None:
    """What drafts for "merged" or "auto" in addition to its sources."""
    if options.draft_model is not None:
        return _load_draft_proposer(target, options.draft_model, DraftingOptions())
    if options.head is not None:
        folder = find_head(name, options.head) or find_checkpoint(target)
        return _load_head_proposer(None, folder, target, **options.select(["head_window"]))
    found = find_pretrained(target, options.head_window) if name == "auto" else None
    if found is None and options.head_window is not None:
        raise ValueError(f"head_window is for a head, and {name} has none for this target; give head")
    return found


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


def find_pretrained(target: Target, head_window: int | None = None) -> HeadProposer | None:
    """A proposer with the pretrained head for this target's weights; None if there is none.

    The head is loaded at the first call and kept as long as the model.
    """
    loaded, key = _loaded.setdefault(target.model, {}), (target.device, target.dtype, head_window)
    if key not in loaded:
        kind = FASTEST.get(target.weights_fingerprint or "")
        folder = PRETRAINED / str(kind)
        load = partial(_load_head_proposer, kind, folder, target, head_window=head_window)
        loaded[key] = load() if kind and folder.is_dir() else None
    kept = loaded[key]
    return kept and kept.renew()


def _load_head_proposer(kind: str | None, folder: Path, target: Target, **shape: Any) -> HeadProposer:
    """A proposer with the head in a folder, of this kind if one is named.

    Raises ValueError for a head of another kind or for another target.
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
    # In the checkpoint of a model, it is that of the model as a draft.
    calibration = load_calibration(folder) if not KINDS[head.kind].in_checkpoint or is_saved_head(folder) else None
    proposer = find_proposer(head.kind)(head, calibration=calibration, **shape).prepare(target)
    _warn_of_weights(str(folder), head.config.target_weights, target)
    return proposer


def _load_draft_proposer(target: Target, draft_model: Target | str | Path, options: DraftingOptions) -> DraftProposer:
    """A proposer with a draft model, calibrated if its folder has a calibration."""
    inner, shape = options.draft_proposer, options.select(SHAPE)
    if not isinstance(draft_model, Target):
        placed: dict[str, Any] = {"dtype": target.dtype, "device": str(target.device)}
        draft_model = load_draft_model(str(draft_model), whole=inner is not None, **placed)
    folder = str(draft_model.model.name_or_path)
    if inner is None:
        calibration = load_calibration(folder) if folder else None
        proposer = DraftProposer(draft_model, calibration=calibration, sampled=options.sampled, **shape)
    else:
        inner = load_proposer(inner, draft_model) if isinstance(inner, str | Path) else inner
        proposer = StagedProposer(draft_model, inner, **shape)
    proposer.begin(target)
    _warn_of_weights(folder, getattr(draft_model.model.config, "target_weights", None), target)
    return proposer


def load_draft_head(folder: Path | str, target: Target) -> VocabularyHead:
    """The head in a folder, in the target's dtype. Errors as in `load_head`.

    Raises ValueError if the head was trained for another target, and warns if that had other weights of the same sizes.
    """
    head = _load_fitting_head(None, Path(folder), target)
    _warn_of_weights(str(folder), head.config.target_weights, target)
    return head


def _load_fitting_head(kind: str | None, folder: Path, target: Target) -> VocabularyHead:
    """`load_draft_head` without the warning, which would contradict an error that comes later."""
    head = load_head(folder, target.dtype, target.vocabulary, target.config.num_hidden_layers)
    refuse_kind(str(kind), folder, head.kind)
    find_proposer(head.kind)(head).check(target)
    share_matrices(head, target)
    return head


def share_matrices(head: VocabularyHead, target: Target) -> None:
    """Let a head use the target's embeddings and output matrix where its own are copies of them.

    The head's code looks up the rows of its own embeddings. So in a target that scales its embeddings, such as Gemma, a
    copy is equal to the scaled rows; only heads with a scale of their own read the raw ones.
    """
    embeddings, output, kind = None, None, KINDS[head.kind]
    if head.embed_tokens is not None:
        embeddings = target.embedding_matrix
        if not kind.has_own_scale and target.embedding_scale != 1:
            embeddings = embeddings * target.embedding_scale
    if head.output == "shared" and not kind.trains_output and target.output_bias is None:
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
