"""The files of a benchmark, its report and an unfinished one to continue, and what a report says of its machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from decode import Target
from decode.cpu.native_ops import list_forms
from decode.cpu.packed_linear import PackedLinear
from decode.devices.backend import find_backend
from heads.atomic_write import write_aside

ROOT = Path(__file__).resolve().parent.parent.parent


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write the JSON with one line per entry of its lists, so that people and `diff` can read it."""
    parts = []
    for key, value in report.items():
        lines = [json.dumps(entry, allow_nan=False) for entry in (value if isinstance(value, list) else [value])]
        text = ",\n  ".join(lines)
        parts.append(f'"{key}": [\n  {text}\n]' if isinstance(value, list) else f'"{key}": {text}')
    content = ("{\n" + ",\n".join(parts) + "\n}\n").encode()
    write_aside(path, lambda file: file.write(content))


def read_begun(path: Path, setup: Mapping[str, Mapping[str, Any]], entries: str) -> list[dict[str, Any]]:
    """The entries of an interrupted run's report, if there is one.

    setup: those parts of the report that must be the same. Raises ValueError if they are not, and for a damaged file.
    """
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        old, new = ({key: value for part in setup for key, value in each[part].items()} for each in (found, setup))
        done = list(found[entries])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); remove it to start again") from error
    if differing := [key for key in {**old, **new} if old.get(key) != new.get(key)]:
        values = " and ".join(f"{key} {json.dumps(old.get(key))}, not {json.dumps(new.get(key))}" for key in differing)
        raise ValueError(f"{path} was begun with {values}; remove it to start again, or write to another place")
    return done


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The hardware and software that speeds depend on, without names of hosts or users."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if find_backend(device).waits else None,
        "os": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def describe_weights(target: Target) -> str:
    """What the weights of the target's layers are in, the form of most of them first: "float32", "Q4_1 and Q8_0"."""
    numbers = Counter[str]()
    for module in target.model.modules():
        if isinstance(module, PackedLinear):
            for form, count in list_forms(module.packed):
                numbers[form] += count
    forms = [form for form, _ in numbers.most_common()] or [str(target.dtype).removeprefix("torch.")]
    method = getattr(getattr(target.model.config, "quantization_config", None), "quant_method", None)
    return " and ".join(forms) + (f" (quantized by {getattr(method, 'value', method)})" if method else "")


def name_numbers(described: Mapping[str, Any]) -> str:
    """The number format of the arithmetic, and of the weights if that is another. Older reports know the first only."""
    dtype, weights = described["dtype"], described.get("weights", described["dtype"])
    return str(dtype) if weights == dtype else f"weights in {weights}, arithmetic in {dtype}"


def find_commit() -> str | None:
    """The git commit of this checkout, with "-dirty" if files are changed; None outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    if not (ROOT / ".git").exists():  # a checkout of another project may contain this folder
        return None
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return None
