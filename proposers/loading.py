"""Proposers from folders of trained heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

import torch

from decode import Target, stream
from decode.prepare import is_fast_in_bfloat16
from heads.folder import load_head
from heads.layout import Head
from proposers.calibration import Calibration, load_calibration
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
LARGEST = 64  # nodes of the trees by which heads are compared
TRIAL, STEPS = 16, 8  # tokens of the prompt on which they are timed; steps timed


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
    head = load_draft_head(folder, target)
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
    """The proposer of the head in the folders that should be fastest with this target; None where none fits.

    Should: by the tau that its calibration expects and by the time that its steps take on this device, which is tried
    where there is a choice. Raises ValueError for a calibration that is damaged.
    """
    fitting: list[tuple[TrainedProposer, Calibration | None]] = []
    for folder in folders:
        calibration = load_calibration(folder)
        try:
            head = load_draft_head(folder, target)
            head.check_target(target.config.hidden_size, target.vocabulary, target.config.num_hidden_layers)
        except ValueError:
            continue
        fitting.append((TRAINED[head.kind](head, calibration=calibration).prepare(target), calibration))
    if len(fitting) > 1:
        fitting.sort(key=lambda candidate: expect_speed(target, *candidate), reverse=True)
    return fitting[0][0] if fitting else None


def expect_speed(target: Target, proposer: TrainedProposer, calibration: Calibration | None) -> float:
    """Tokens a second to be expected of one text, in trees of the size that pays most on average.

    A head that was not calibrated counts as one that guesses nothing.
    """
    cost = target.cost()
    taus = [1.0] if calibration is None else calibration.expect_tau(LARGEST)
    nodes, tau = max(enumerate(taus, start=1), key=lambda tree: tree[1] / cost(tree[0]))
    return tau / time_step(target, proposer, nodes)


def time_step(target: Target, proposer: TrainedProposer, nodes: int) -> float:
    """The seconds that a step with so many nodes takes: the shortest of a few, since other work only adds."""
    trial = proposer.renew()
    trial.nodes = nodes
    chunks = stream(target, [[0] * TRIAL], trial, stop_ids=(), text=False)
    return min(chunk.stats.seconds.total for chunk in islice(chunks, 1, 1 + STEPS))  # the first reads the prompt


def load_draft_head(folder: Path | str, target: Target) -> Head:
    """The head in a folder, in the number format that it should draft in for this target. Errors as in `load_head`."""
    return load_head(folder, choose_dtype(target), target.vocabulary, target.config.num_hidden_layers)


def choose_dtype(target: Target) -> torch.dtype:
    """The number format to draft in: the target's, but none that is needlessly wide.

    On a CPU a draft takes as long as its weights take to be read, and guesses are as good in bfloat16.
    """
    halves = target.dtype == torch.float32 and target.device.type == "cpu" and is_fast_in_bfloat16(target.device)
    return torch.bfloat16 if halves else target.dtype
