"""Proposers from folders of trained heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from decode import Target
from heads.folder import load_head
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


def load_proposer(
    folder: Path | str,
    target: Target,
    kind: str | None = None,
    *,
    tree: str | Sequence[Ranks] = "dynamic",
    nodes: int | None = None,
) -> TrainedProposer:
    """The proposer of the head in a folder, with its calibration where there is one, ready for this target.

    kind: a key of `TRAINED`, where it must be that. Raises ValueError for a head of another kind or for another
    target, and for a folder that is not a head's.
    """
    head = load_head(folder, target.dtype, target.vocabulary, target.config.num_hidden_layers)
    if kind is not None and head.kind != kind:
        raise ValueError(f"the head in {folder} is of kind {head.kind}, not {kind}")
    proposer = TRAINED[head.kind](head, tree=tree, nodes=nodes, calibration=load_calibration(folder))
    return proposer.prepare(target)
