"""Proposers from folders of trained heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import inf
from pathlib import Path

import torch

from decode import Target, stream
from decode.cpu.acceleration import is_fast_in_bfloat16
from heads.checkpoint import load_head
from heads.formats.layout import Head
from proposers.calibration import Calibration, load_calibration
from proposers.eagle import EagleProposer
from proposers.fixed_trees import Ranks
from proposers.head_proposer import HeadProposer
from proposers.hydra import HydraProposer
from proposers.medusa import MedusaProposer

HEAD_PROPOSERS: dict[str, type[HeadProposer]] = {
    "medusa": MedusaProposer,
    "hydra": HydraProposer,
    "eagle": EagleProposer,
    "eagle3": EagleProposer,
}
EAGLES = tuple(kind for kind, proposer in HEAD_PROPOSERS.items() if proposer is EagleProposer)
COMPARED = 64  # nodes of the largest tree by which heads are compared
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
) -> HeadProposer:
    """The proposer of the head in a folder, with its calibration where there is one, ready for this target.

    kind: a key of `HEAD_PROPOSERS`, where it must be that. tree, nodes, sampled: as in `HeadProposer`. depth, width: as in
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
    make: Callable[..., HeadProposer] = HEAD_PROPOSERS[head.kind]
    calibration = load_calibration(folder)
    return make(head, tree=tree, nodes=nodes, sampled=sampled, calibration=calibration, **shape).prepare(target)


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
