"""Proposers from folders of trained heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from decode import Target
from heads.folder import load_head
from heads.layout import Head
from proposers.calibration import load_calibration
from proposers.eagle import EagleProposer
from proposers.hydra import HydraProposer
from proposers.medusa import MedusaProposer
from proposers.trained import TrainedProposer
from proposers.trees import Path as Ranks

TRAINED: dict[str, type[TrainedProposer]] = {
    "medusa": MedusaProposer,
    "hydra": HydraProposer,
    "eagle": EagleProposer,
    "eagle3": EagleProposer,
}
EAGLES = tuple(kind for kind, proposer in TRAINED.items() if proposer is EagleProposer)
COMPARED = 16  # nodes of the trees by which heads are compared


def load_proposer(
    folder: Path | str,
    target: Target,
    kind: str | None = None,
    *,
    tree: str | Sequence[Ranks] = "dynamic",
    nodes: int | None = None,
    depth: int | None = None,
    width: int | None = None,
    sampled: bool = False,
) -> TrainedProposer:
    """The proposer of the head in a folder, with its calibration where there is one, ready for this target.

    kind: a key of `TRAINED`, where it must be that. tree, nodes, sampled: as in `TrainedProposer`. depth, width: as in
    `EagleProposer`, for its heads only; None leaves them at its defaults. Raises ValueError for a head of another kind
    or for another target, and for a folder that is not a head's.
    """
    head = _load(folder, target)
    if kind is not None and head.kind != kind:
        raise ValueError(f"the head in {folder} is of kind {head.kind}, not {kind}")
    shape = {name: value for name, value in {"depth": depth, "width": width}.items() if value is not None}
    if shape and head.kind not in EAGLES:
        raise ValueError(
            f"{' and '.join(shape)} can be chosen for {', '.join(EAGLES)}; the head in {folder} is of kind {head.kind}"
        )
    make: Callable[..., TrainedProposer] = TRAINED[head.kind]
    calibration = load_calibration(folder)
    return make(head, tree=tree, nodes=nodes, sampled=sampled, calibration=calibration, **shape).prepare(target)


def load_best(target: Target, folders: Iterable[Path | str]) -> TrainedProposer | None:
    """The proposer of the best head for this target among those in the folders; None where none fits.

    Best is what has the highest tau by its calibration, in trees of 16 nodes; a head that was not calibrated counts as
    1. Raises ValueError for a calibration that is damaged.
    """
    for folder in sorted(folders, key=_expect_tau, reverse=True):
        try:
            head = _load(folder, target)
            head.check_target(target.config.hidden_size, target.vocabulary, target.config.num_hidden_layers)
        except ValueError:
            continue
        return TRAINED[head.kind](head, calibration=load_calibration(folder)).prepare(target)
    return None


def _load(folder: Path | str, target: Target) -> Head:
    return load_head(folder, target.dtype, target.vocabulary, target.config.num_hidden_layers)


def _expect_tau(folder: Path | str) -> float:
    calibration = load_calibration(folder)
    return 1.0 if calibration is None else calibration.expect_tau(COMPARED)[-1]
