"""From a name to a proposer, and from a folder of a trained head to the proposer that drafts with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import torch

from decode import PlainProposer, Proposer, Target, stream
from decode.cpu.acceleration import is_fast_in_bfloat16
from decode.models.loading import first_layers
from heads import PRETRAINED
from heads.checkpoint import load_head
from heads.formats.layout import Head
from proposers.calibration import Calibration, load_calibration
from proposers.draft import DraftProposer
from proposers.eagle import EagleProposer
from proposers.fixed_trees import Ranks
from proposers.head_proposer import HeadProposer
from proposers.hydra import HydraProposer
from proposers.medusa import MedusaProposer
from proposers.ngram import NGramProposer

HEAD_PROPOSERS: dict[str, type[HeadProposer]] = {
    "medusa": MedusaProposer,
    "hydra": HydraProposer,
    "eagle": EagleProposer,
    "eagle3": EagleProposer,
}
EAGLES = tuple(kind for kind, proposer in HEAD_PROPOSERS.items() if proposer is EagleProposer)
_HEAD_OPTIONS = ("head", "tree", "nodes", "sampled")
OPTIONS = {  # of `load_proposer`, by name
    "none": (),
    "ngram": (),
    "draft": ("draft_model", "depth", "width", "sampled"),
    **{kind: _HEAD_OPTIONS + ("depth", "width") * (kind in EAGLES) for kind in HEAD_PROPOSERS},
    "auto": ("head",),
}
NAMES = tuple(OPTIONS)
DRAFT_LAYERS = 8  # of the target, where no draft model is named
COMPARED = 64  # nodes of the largest tree by which heads are compared
TRIAL, STEPS = 16, 8  # tokens of the prompt on which they are timed; steps timed


def load_proposer(
    name: str | Path,
    target: Target,
    *,
    head: str | Path | None = None,
    draft_model: Target | str | Path | None = None,
    tree: str | Sequence[Ranks] | None = None,
    nodes: int | None = None,
    depth: int | None = None,
    width: int | None = None,
    sampled: bool = False,
) -> Proposer:
    """A proposer that is ready for this target.

    name: one of `NAMES`, or the folder of a head. "auto" takes the pretrained head that should be fastest, or
    "ngram" if none fits.
    head: a trained head's folder; None takes the default model's pretrained head of that kind.
    draft_model: for "draft", a target, or a folder or hub id to load; None takes the target's own first layers.
    tree, nodes, sampled: see `HeadProposer`. depth, width: see `EagleProposer`; for "draft", its length and width.

    Raises ValueError for an unknown name, an option that the proposer does not have, and a head of another kind or for
    another target.
    """
    options = {"tree": tree, "nodes": nodes, "depth": depth, "width": width, "sampled": sampled or None}
    options = {key: value for key, value in options.items() if value is not None}
    if isinstance(name, Path) or name not in NAMES:
        if head is not None or not Path(name).is_dir():
            raise ValueError(f"unknown proposer {str(name)!r}; choose from {', '.join(NAMES)} or name a head's folder")
        if draft_model is not None:
            raise ValueError(f"draft_model is for the proposer draft, not for the head in {name}")
        return _load_head_proposer(name, target, None, options)
    given = {"head": head, "draft_model": draft_model, **options}
    unused = [key for key, value in given.items() if value is not None and key not in OPTIONS[name]]
    if unused:
        raise ValueError(f"{name} has no option {', '.join(unused)}; it has {', '.join(OPTIONS[name]) or 'none'}")
    if name == "draft":
        return _load_draft_proposer(target, draft_model, options)
    if name in HEAD_PROPOSERS:
        return _load_head_proposer(_find_pretrained(name, target) if head is None else head, target, name, options)
    if name == "auto":
        if head is not None:
            return _load_head_proposer(head, target, None, {})
        return load_best(target, (PRETRAINED / kind for kind in HEAD_PROPOSERS)) or NGramProposer()
    return PlainProposer() if name == "none" else NGramProposer()


def _load_head_proposer(
    folder: str | Path, target: Target, kind: str | None, options: Mapping[str, Any]
) -> HeadProposer:
    head = load_draft_head(folder, target)
    if kind is not None and head.kind != kind:
        raise ValueError(f"the head in {folder} is of kind {head.kind}, not {kind}")
    unused = [key for key in options if key not in OPTIONS[head.kind]]
    if unused:
        raise ValueError(
            f"{' and '.join(unused)} can be chosen for {', '.join(EAGLES)}; the head in {folder} is of kind {head.kind}"
        )
    make: Callable[..., HeadProposer] = HEAD_PROPOSERS[head.kind]
    return make(head, calibration=load_calibration(folder), **options).prepare(target)


def _find_pretrained(kind: str, target: Target) -> Path:
    """The folder of the default model's head. Raises ValueError if the head does not fit the target."""
    folder = PRETRAINED / kind
    try:
        HEAD_PROPOSERS[kind](load_draft_head(folder, target)).check(target)
    except ValueError as error:
        raise ValueError(
            f"the pretrained {kind} head is for the default model ({error}); pass a head that was trained for this "
            'target: head="FOLDER"'
        ) from error
    return folder


def _load_draft_proposer(
    target: Target, draft_model: Target | str | Path | None, options: Mapping[str, Any]
) -> DraftProposer:
    if draft_model is None:
        draft = Target(first_layers(target.model, DRAFT_LAYERS), target.tokenizer)
    elif isinstance(draft_model, Target):
        draft = draft_model
    else:
        draft = Target.load(str(draft_model), dtype=target.dtype, device=str(target.device))
    names = {"depth": "length"}
    proposer = DraftProposer(draft, **{names.get(key, key): value for key, value in options.items()})
    proposer.check(target)
    return proposer


def load_best(target: Target, folders: Iterable[Path | str]) -> HeadProposer | None:
    """The proposer of the head in the folders that should be fastest with this target; None where none fits.

    Should: by the tau that its calibration expects and by the time that its steps take on this device, which is tried
    where there is a choice. Those without a calibration come last. Raises ValueError for a head that fits and whose
    calibration is damaged.
    """
    fitting: list[tuple[HeadProposer, Calibration | None]] = []
    for folder in folders:
        try:
            head = load_draft_head(folder, target)
            HEAD_PROPOSERS[head.kind](head).bind(target)
        except ValueError:
            continue
        calibration = load_calibration(folder)
        fitting.append((HEAD_PROPOSERS[head.kind](head, calibration=calibration).prepare(target), calibration))
    if len(fitting) > 1:
        fitting.sort(key=lambda candidate: expect_speed(target, *candidate), reverse=True)
    return fitting[0][0] if fitting else None


def expect_speed(target: Target, proposer: HeadProposer, calibration: Calibration | None) -> float:
    """Tokens a second to be expected of one text, in the tree that pays most on average; 0 without a calibration."""
    if calibration is None:
        return 0.0
    cost = target.cost_curve()
    nodes, tau = max(enumerate(calibration.expect_tau(COMPARED), start=1), key=lambda tree: tree[1] / cost(tree[0]))
    trial = proposer.renew()
    trial.nodes, trial.paths = nodes, calibration.best_tree(nodes)
    return tau / time_step(target, trial)


def time_step(target: Target, proposer: HeadProposer) -> float:
    """The seconds that a step takes: the shortest of a few, since other work on the machine only adds."""
    prompt = [place % target.vocabulary for place in range(min(TRIAL, target.context // 2))]
    chunks = stream(target, [prompt], proposer, stop_ids=(), text=False)
    tried = islice(chunks, 1, 1 + STEPS)  # the first is the prompt's
    return min((chunk.stats.seconds.total for chunk in tried), default=inf)


def load_draft_head(folder: Path | str, target: Target) -> Head:
    """The head in a folder, in the number format that it should draft in for this target. Errors as in `load_head`."""
    return load_head(folder, choose_dtype(target), target.vocabulary, target.config.num_hidden_layers)


def choose_dtype(target: Target) -> torch.dtype:
    """The number format to draft in: the target's, but bfloat16 for float32 on a CPU that is fast in it.

    A draft takes as long there as its weights take to be read.
    """
    halves = target.dtype == torch.float32 and target.device.type == "cpu" and is_fast_in_bfloat16(target.device)
    return torch.bfloat16 if halves else target.dtype
