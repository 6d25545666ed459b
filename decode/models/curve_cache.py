"""Measured cost curves, kept in the user's cache, so that later starts measure nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path

import torch
import transformers

from decode.cpu.acceleration import is_compiled
from decode.cpu.build_cache import environment
from decode.models.cost_curve import SIZES, CostCurve
from decode.models.stock_model import StockModel
from decode.models.user_cache import scratch, user_cache

PACKAGE = Path(__file__).parents[1]


def curve_file(target: StockModel, batch: int, context: int) -> Path | None:
    """Where a curve is kept, named after a digest of what it depends on. None for models that keep no curves.

    Those are models on several devices or on other than CPUs and CUDA GPUs, because their speed depends on more.
    """
    model, kind = target.model, target.device.type
    if kind not in ("cpu", "cuda") or any(hasattr(module, "_hf_hook") for module in model.modules()):
        return None
    config = sorted(item for item in target.config.to_dict().items() if item[0] != "_name_or_path")
    settings = config, target.config._attn_implementation, target.dtype
    device = torch.cuda.get_device_name(target.device) if kind == "cuda" else kind
    machine = device, torch.get_num_threads(), torch.get_float32_matmul_precision(), environment()
    versions = transformers.__version__, _digest_package()
    # A model's repr tells packed, quantized and adapted layers apart. Addresses in it change with every start.
    key = repr((batch, context, settings, repr(model), is_compiled(model), machine, versions))
    digest = hashlib.sha256(re.sub(" at 0x[0-9a-f]+", "", key).encode()).hexdigest()
    try:
        return user_cache() / "curves" / f"{digest}.json"
    except RuntimeError:  # the user has no home folder
        return None


def load_curve(file: Path | None) -> CostCurve | None:
    """The curve in a file; None if there is none, or the file is damaged."""
    try:
        seconds = [float(each) for each in json.loads(file.read_text())["seconds"]] if file is not None else []
    except (OSError, ValueError, TypeError, KeyError):
        return None
    is_whole = 1 < len(seconds) <= len(SIZES) and all(0 < each < inf for each in seconds)
    return CostCurve(SIZES[: len(seconds)], seconds) if is_whole else None


def save_curve(file: Path | None, curve: CostCurve) -> None:
    """Keep a curve if the cache can be written."""
    if file is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with scratch(file.with_suffix(f".{os.getpid()}")) as folder:
                new = folder / file.name
                new.write_text(json.dumps({"seconds": curve.seconds}))
                new.replace(file)


@cache
def _digest_package() -> str:
    """A digest of this package's source files: any of them may have made passes faster."""
    files = sorted(file for file in PACKAGE.rglob("*") if file.suffix in (".py", ".cpp", ".h"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
