"""The files of a benchmark: its report, and the records of an unfinished run to continue from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import transformers

from heads.atomic_write import write_aside
from scripts.benchmark.rows import make_rows

ROOT = Path(__file__).resolve().parent.parent.parent
SHOWN = {"settings": ("model", "commit"), "machine": ("cpu", "gpu", "threads")}


class Records:
    """One JSON object per line, appended as questions are finished. An interrupted run continues after the last one.

    path: None keeps the records in memory only. setup: what must be the same for a later run to continue. Raises
    ValueError for a file of another setup and for a damaged file.
    """

    def __init__(self, path: Path | None, setup: Mapping[str, Mapping[str, Any]]) -> None:
        self.path, self.setup = path, setup
        self.found: list[dict[str, Any]] = []
        if path is None or not path.exists():
            return
        complete = path.read_bytes().rpartition(b"\n")[0].splitlines()  # a half last line is measured again
        try:
            head, *self.found = [json.loads(line) for line in complete] or [setup]
            keys = [(part, key) for part in setup for key in {**head[part], **setup[part]}]
            values = [(key, head[part].get(key), setup[part].get(key)) for part, key in keys]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error}); remove it to start again") from error
        if differing := [f"{key} {json.dumps(old)}, not {json.dumps(new)}" for key, old, new in values if old != new]:
            raise ValueError(
                f"{path} was begun with {' and '.join(differing)}; continue with the same, remove it to start again, "
                "or give another --json"
            )

    def begin(self) -> None:
        """Write the file again with its complete lines only."""
        if self.path is not None:
            content = "".join(json.dumps(line, allow_nan=False) + "\n" for line in (self.setup, *self.found))
            write_aside(self.path, lambda file: file.write(content.encode()))

    def append(self, record: dict[str, Any]) -> None:
        """Add a record and write it to disk."""
        self.found.append(record)
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write the JSON with one line per entry of its lists, so that people and `diff` can read it."""
    parts = []
    for key, value in report.items():
        if isinstance(value, list) and value:
            text = "[\n    " + ",\n    ".join(json.dumps(entry, allow_nan=False) for entry in value) + "\n  ]"
        else:
            text = json.dumps(value, indent=2, allow_nan=False).replace("\n", "\n  ")
        parts.append(f"  {json.dumps(key)}: {text}")
    content = ("{\n" + ",\n".join(parts) + "\n}\n").encode()
    write_aside(path, lambda file: file.write(content))


def read_report(path: Path, methods: Sequence[str] | None = None) -> dict[str, Any]:
    """A report, with its rows computed again from its records.

    methods: those to show; None shows all. Raises ValueError for a file that is not a report, or has no such method.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for part, keys in SHOWN.items() for key in keys if key not in report[part]]
        if "passes" not in report:
            found = [*report["settings"]["methods"], *report["settings"].get("peers", ())]
            unknown = sorted({*(methods or ())} - {*found})
            report["rows"] = [] if unknown else make_rows(report["records"], report["differences"], methods or found)
        elif any(len(entry["nodes"]) != len([*map(median, entry["samples_ms"])]) for entry in report["passes"]):
            raise ValueError("each number of nodes needs its samples")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a report of draftless bench ({error!r})") from error
    if missing:
        raise ValueError(f"{path} is not a report of draftless bench: it lacks {', '.join(missing)}")
    if "passes" not in report and unknown:
        raise ValueError(f"{path} has no method {', '.join(unknown)}; it has {', '.join(found)}")
    return dict(report)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The hardware and software that speeds depend on, without names of hosts or users."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "os": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def find_commit() -> str | None:
    """The git commit of this checkout, with "-dirty" if files are changed; None outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    if not (ROOT / ".git").exists():  # a checkout of another project may contain this folder
        return None
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return None


def _cpu_name() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
