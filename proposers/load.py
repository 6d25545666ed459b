"""Load a proposer by its name or from a trained head's folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import torch

from decode import PlainProposer, Proposer, Target, stream
from decode.cpu.acceleration import is_fast_in_bfloat16
from decode.models.fixed_cost import LEVEL_TIME
from decode.models.loading import first_layers
from decode.target import check_target
from heads import PRETRAINED
from heads.checkpoint import load_head
from heads.formats.layout import Head
from proposers.calibration import Calibration, load_calibration
from proposers.draft import DraftProposer
from proposers.eagle import EagleProposer
from proposers.head_proposer import HeadProposer
from proposers.hydra import HydraProposer
from proposers.lookahead import LookaheadProposer
from proposers.medusa import MedusaProposer
from proposers.merged import MergedProposer, RecyclingProposer, SuffixProposer
from proposers.ngram import NGramProposer
from proposers.sources import AnswerStore
from proposers.sources.levels import HeadSource
from proposers.trees.fixed import Ranks

HEAD_PROPOSERS: dict[str, type[HeadProposer]] = {
    "medusa": MedusaProposer,
    "hydra": HydraProposer,
    "eagle": EagleProposer,
    "eagle3": EagleProposer,
}
EAGLES = tuple(kind for kind, proposer in HEAD_PROPOSERS.items() if proposer is EagleProposer)
TRAINING_FREE: dict[str, Callable[..., Proposer]] = {  # they need the target alone
    "none": PlainProposer,
    "ngram": NGramProposer,
    "suffix": SuffixProposer,
    "recycling": RecyclingProposer,
    "lookahead": LookaheadProposer,
}
_TRAINED, _SHAPE = ("head", "tree", "nodes", "sampled"), ("depth", "width")
OPTIONS = {  # of `load_proposer`, by the proposer's name
    "none": (),
    "ngram": (),
    "suffix": ("store", "nodes"),
    "recycling": ("nodes",),
    "lookahead": (),
    "merged": ("head", "store", "nodes"),
    "draft": ("draft_model", "sampled", *_SHAPE),
    **{kind: (*_TRAINED, *(_SHAPE if kind in EAGLES else ())) for kind in HEAD_PROPOSERS},
    "auto": ("head", "store"),
}
DRAFT_LAYERS = 8  # of the target, where no draft model is named
CLOSE = 0.95  # share of the best head's speed from which a head is about as fast
COMPARED = 64  # nodes of the largest tree by which heads are compared
TRIAL_TOKENS, TRIAL_STEPS = 16, 8  # of the prompt and the answer by which they are timed


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
    store: AnswerStore | None = None,
) -> Proposer:
    """A proposer that is ready for this target.

    name: a key of `OPTIONS`, or the folder of a head. "auto" is "merged" with the pretrained head that should be
    fastest, if one fits.
    head: a trained head's folder; None takes the default model's pretrained head of that kind, for "merged" none.
    draft_model: for "draft", a target, or a folder or hub id to load; None takes the target's own first layers.
    store: finished answers to draft from, see `MergedProposer`.
    tree, nodes, sampled: see `HeadProposer`. depth, width: see `EagleProposer`; for "draft", its length and width.

    Raises ValueError for an unknown name, an option that the proposer does not have, and a head of another kind or for
    another target, and TypeError unless `target` is a target.
    """
    check_target(target)
    options: dict[str, Any] = {"tree": tree, "nodes": nodes, "depth": depth, "width": width, "sampled": sampled or None}
    options = {key: value for key, value in options.items() if value is not None}
    others = {"head": head, "draft_model": draft_model, "store": store}
    given = {*options} | {key for key, value in others.items() if value is not None}
    if isinstance(name, Path) or name not in OPTIONS:
        if head is not None and Path(name).is_dir():
            raise ValueError(f"both {str(name)!r} and head name a head's folder; give one")
        if head is not None or not Path(name).is_dir():
            known = ", ".join(OPTIONS)
            raise ValueError(f"unknown proposer {str(name)!r}; choose from {known} or name a head's folder")
        return _load_head_proposer(None, Path(name), target, given, **options)
    _check_options(name, given)
    if name in HEAD_PROPOSERS:
        return _load_head_proposer(name, PRETRAINED / name if head is None else Path(head), target, given, **options)
    if name == "draft":
        return _load_draft_proposer(target, draft_model, depth, 1 if width is None else width, sampled)
    if name in TRAINING_FREE:
        settings = {"store": store, "nodes": nodes}
        return TRAINING_FREE[name](**{key: value for key, value in settings.items() if value is not None})
    best = None
    if head is not None:
        best = _load_head_proposer(None, Path(head), target)
    elif name == "auto":
        best = load_best(target, (PRETRAINED / kind for kind in HEAD_PROPOSERS))
    return MergedProposer(head=None if best is None else HeadSource(best), store=store, nodes=nodes)


def _check_options(kind: str, given: set[str]) -> None:
    if unknown := sorted(given - {*OPTIONS[kind]}):
        raise ValueError(f"{kind} has no option {', '.join(unknown)}; it has {', '.join(OPTIONS[kind]) or 'none'}")


def _load_head_proposer(
    kind: str | None, folder: Path, target: Target, given: Iterable[str] = (), **options: Any
) -> HeadProposer:
    """A proposer with the head in a folder, of this kind if one is named. Raises ValueError for unknown options."""
    head = _load_head(kind, folder, target)
    _check_options(head.kind, {*given})
    return _make_head_proposer(head, folder, target, **options)


def _load_head(kind: str | None, folder: Path, target: Target) -> Head:
    """The head in a folder, checked against the target and, if named, its kind."""
    try:
        head = load_draft_head(folder, target)
        if kind not in (head.kind, None):
            raise ValueError(f"the head in {folder} is of kind {head.kind}, not {kind}")
        HEAD_PROPOSERS[head.kind](head).check(target)
    except ValueError as error:
        if folder.parent != PRETRAINED:
            raise
        raise ValueError(
            f"the pretrained {folder.name} head is for the default model ({error}); pass a head that was trained for "
            'this target: head="FOLDER"'
        ) from error
    return head


def _make_head_proposer(head: Head, folder: Path, target: Target, **options: Any) -> HeadProposer:
    return HEAD_PROPOSERS[head.kind](head, calibration=load_calibration(folder), **options).prepare(target)


def _load_draft_proposer(
    target: Target, model: Target | str | Path | None, length: int | None, width: int, sampled: bool
) -> DraftProposer:
    if model is None:
        model = Target(first_layers(target.model, DRAFT_LAYERS), target.tokenizer)
    elif not isinstance(model, Target):
        model = Target.load(str(model), dtype=target.dtype, device=str(target.device))
    proposer = DraftProposer(model, width=width, sampled=sampled, length=length)
    proposer.check(target)
    return proposer


def load_best(target: Target, folders: Iterable[Path | str]) -> HeadProposer | None:
    """The head proposer that should be fastest with this target; None if no head in the folders fits.

    Compared are tokens per second, by each calibration's expected tau and by the time of a step on this device. Of
    heads that are about equally fast, the one with the shortest step is taken: in a merged tree, other sources name
    some of the tokens for which another head takes longer. Heads without a calibration come last.

    Raises ValueError if a head fits and its calibration is damaged.
    """
    fitting = []
    for folder in map(Path, folders):
        try:
            head = _load_head(None, folder, target)
        except ValueError:
            continue
        fitting.append(_make_head_proposer(head, folder, target))
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    tried = [try_head(target, proposer, proposer.calibration) for proposer in fitting]
    enough = CLOSE * max(speed for speed, _ in tried)
    steps = [seconds if speed >= enough else inf for speed, seconds in tried]
    return fitting[steps.index(min(steps))]


def try_head(target: Target, proposer: HeadProposer, calibration: Calibration | None) -> tuple[float, float]:
    """Tokens per second to be expected for one text with the best tree on average, and the seconds of its step.

    0 and infinitely many without a calibration.
    """
    if calibration is None:
        return 0.0, inf
    cost = target.cost_curve()
    nodes, tau = max(enumerate(calibration.expect_tau(COMPARED), start=1), key=lambda tree: tree[1] / cost(tree[0]))
    trial = proposer.renew()
    trial.nodes, trial.paths = nodes, calibration.best_tree(nodes)
    seconds = time_step(target, trial)
    return tau / seconds, seconds


def time_step(target: Target, proposer: HeadProposer) -> float:
    """The seconds that a step takes: the shortest of a few, because other work on the machine only adds.

    With a deterministic target, the time in passes over one node, by its fixed cost curve.
    """
    if target.deterministic:
        levels = proposer.depth if proposer.levelwise else 1
        return target.cost_curve()(proposer.nodes or 1) + levels * LEVEL_TIME
    prompt = [place % target.vocabulary for place in range(min(TRIAL_TOKENS, target.context // 2))]
    chunks = stream(target, [prompt], proposer, stop_ids=(), text=False)
    steps = islice(chunks, 1, 1 + TRIAL_STEPS)  # the first is the prefill
    return min((chunk.stats.seconds.total for chunk in steps), default=inf)


def load_draft_head(folder: Path | str, target: Target) -> Head:
    """The head in a folder, in the dtype in which it should draft for this target. Errors as in `load_head`.

    Drafting takes as long as reading the weights. So it is bfloat16 for a float32 target on a CPU with fast bfloat16,
    else the target's dtype. Warns if the head was trained for other weights of the same sizes.
    """
    halve = target.dtype == torch.float32 and target.device.type == "cpu" and is_fast_in_bfloat16(target.device)
    dtype = torch.bfloat16 if halve else target.dtype
    head = load_head(folder, dtype, target.vocabulary, target.config.num_hidden_layers)
    trained, given = head.config.target_weights, getattr(target.model, "weights_fingerprint", None)
    if None not in (trained, given) and trained != given:
        warnings.warn(
            f"the head in {str(folder)!r} was trained for {head.config.target_name or 'a model'} with other weights "
            "than this target's; the text stays the same, but fewer draft tokens may be accepted",
            stacklevel=2,
        )
    return head
