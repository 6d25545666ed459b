"""Cost curves that this run's clock has no part in, for runs that must choose the same draft trees: a run that is
repeated, or all ranks of a `torch.distributed` group.
"""

from __future__ import annotations

import torch
from torch import distributed

from decode.models.cost_curve import SIZES, CostCurve

# Seconds relative to one token. A CPU: the default model in float32 on two cores. A GPU: an estimate, not timed; while
# weights are read, it has time for the arithmetic of about 300 tokens.
FIXED = {
    "cpu": CostCurve((1, 4, 8, 12, 16, 32, 64), (1.0, 1.0, 1.12, 1.24, 1.58, 2.69, 5.26)),
    "cuda": CostCurve((1, 64, 256, 512), (1.0, 1.1, 1.4, 2.4)),
}
LEVEL_TIME = 0.05  # of drafting one level, in passes over one node: what an EAGLE-3 head reads next to an 8B model


def fixed_curve(chosen: bool | CostCurve, device: torch.device) -> CostCurve:
    """The curve of a text alone. chosen: a stored curve, or True for that of the kind of device.

    In a `torch.distributed` group it is the first rank's, so every rank must call this.
    """
    curves = [chosen if isinstance(chosen, CostCurve) else FIXED.get(device.type, FIXED["cpu"])]
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(curves, src=0)
    return curves[0]


def for_batch(curve: CostCurve, rows: int) -> CostCurve:
    """The curve of a batch, if time depends on the tokens of all rows together."""
    return CostCurve(SIZES, [curve(rows * size) for size in SIZES])
