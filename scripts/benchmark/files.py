"""What a bench leaves behind: its report, and until that is whole, the records it can go on from."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from heads.atomic_write import write_aside

KEYS = ("settings", "machine", "rows", "differences", "records")
SPEEDS = ("tokens_per_second", "speedup_vs_none", "speedup_vs_hf")
# What tables and plots show of them.
SHOWN = {
    "settings": ("model", "temperature", "batch_size"),
    "machine": ("cpu", "gpu", "threads", "dtype"),
    "rows": ("method", "category", "questions", "tau", "loops", "identical", "largest_gap", *SPEEDS),
}


class Records:
    """One JSON object a line, appended as questions are finished: a run that was cut off goes on behind the last one.

    path: None keeps them in memory only. setup: what must be the same for a later run to go on. Raises ValueError
    where what is there was begun with another one, or is not such a file.
    """

    def __init__(self, path: Path | None, setup: Mapping[str, Mapping[str, Any]]) -> None:
        self.path, self.setup = path, setup
        self.found: list[dict[str, Any]] = []
        if path is None or not path.exists():
            return
        whole = path.read_bytes().rpartition(b"\n")[0].splitlines()  # a half last line is measured again
        try:
            head, *self.found = [json.loads(line) for line in whole] or [setup]
            differing = list(_compare(head, setup))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error}); remove it to begin anew") from error
        if differing:
            raise ValueError(
                f"{path} was begun with {' and '.join(differing)}; go on with the same, remove it to begin anew, or "
                "give another --json"
            )

    def begin(self) -> None:
        """Make the file whole: what is kept, and nothing behind it."""
        if self.path is not None:
            lines = [json.dumps(line, allow_nan=False) + "\n" for line in (self.setup, *self.found)]
            content = "".join(lines).encode()
            write_aside(self.path, lambda file: file.write(content))

    def append(self, record: dict[str, Any]) -> None:
        self.found.append(record)
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _compare(old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for part in new:
        for key in {**old[part], **new[part]}:
            before, now = old[part].get(key), new[part].get(key)
            if before != now:
                yield f"{key} {json.dumps(before)}, not {json.dumps(now)}"


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write the JSON with a line for each entry of its lists: to be read, and to be compared by `diff`."""
    parts = []
    for key in KEYS:
        value = report[key]
        if isinstance(value, list) and value:
            text = "[\n    " + ",\n    ".join(json.dumps(entry, allow_nan=False) for entry in value) + "\n  ]"
        else:
            text = json.dumps(value, indent=2, allow_nan=False).replace("\n", "\n  ")
        parts.append(f"  {json.dumps(key)}: {text}")
    content = ("{\n" + ",\n".join(parts) + "\n}\n").encode()
    write_aside(path, lambda file: file.write(content))


def read_report(path: Path) -> dict[str, Any]:
    """Read it back. Raises ValueError where it is not one."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    try:
        shapes = {tuple(row) for row in report["rows"]}
        whole = len(shapes) == 1 and {*SHOWN["rows"]} <= {*shapes.pop()}
        whole = whole and all({*SHOWN[part]} <= {*report[part]} for part in ("settings", "machine"))
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is not a report that this bench wrote")
    return dict(report)


def check_writable(path: Path | None, option: str) -> None:
    """Raise ValueError unless a file can be written there: before the work, not after it."""
    if path is None:
        return
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ValueError(f"{option} {path} cannot be written; it names a file in a folder that exists")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The hardware and software that speeds depend on; no names of hosts or users."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "os": _os_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _os_name() -> str:
    with suppress(OSError):
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']} ({platform.machine()})"
    return f"{platform.system()} {platform.release()} ({platform.machine()})"
