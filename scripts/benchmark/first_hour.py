"""The first hour on a device: its tests, then steps, passes and methods, each part in a process with a time limit.

A part that fails or takes too long is a line of the page and not the end of it. Report and page are written after each
part; the same command goes on after the parts that are done.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from decode.devices.backend import find_backend
from draftless_commands.benchmark.files import ROOT, describe_machine, find_commit, read_begun, write_report
from draftless_commands.shared.options import ModelOptions
from draftless_commands.shared.results import to_markdown
from heads.atomic_write import write_aside

REPORT, PAGE = "report.json", "page.md"
DONE = "done"
SHOWN = 60  # lines of a part's output that the page shows, and of its errors the report keeps
OWN = "draftless: "  # begins a notice


@dataclass(frozen=True)
class Part:
    """A command, and the minutes after which it is killed."""

    name: str
    command: Sequence[str]
    minutes: float


def list_parts(args: Namespace, folder: Path) -> list[Part]:
    """The parts for a device, in order."""
    device = args.device or "cuda"
    steps = [sys.executable, "-m", "draftless_commands.benchmark.steps", "--device", device]
    is_gpu = find_backend(torch.device(device)).waits
    modes, contexts = (("packed", "graphs"), (4096, 32768)) if is_gpu else (("packed",), (1024,))
    cases = [*((mode, 512, 1) for mode in modes), *((modes[-1], each, 1) for each in contexts), (modes[-1], 512, 8)]
    bench = [sys.executable, "-m", "draftless_commands.bench", "--device", device]
    bench += list_options(args, "model", "dtype", "accelerate", "repeats", "threads")
    methods = [*bench, *list_options(args, "limit", "max_new_tokens"), "--methods"]

    def save(name: str) -> list[str]:
        return ["--json", str(folder / f"{name}.json")]

    test = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", str(ROOT / "tests" / "decode" / "cuda" / "test_gpu.py")]
    return [
        Part("tests", test, 25),
        *(
            Part(
                f"steps, {mode}, {context} tokens, {rows} rows",
                [*steps, mode, f"--context={context}", f"--rows={rows}"],
                5,
            )
            for mode, context, rows in cases
        ),
        Part("passes", [*bench, "--passes", *save("passes")], 10),
        Part("methods", [*methods, "none,hf,ngram,merged", *save("methods")], 20),
        Part("methods, 8 rows", [*methods, "none,ngram,merged", "--batch-size", "8", *save("batches")], 10),
        Part("methods, sampled", [*methods, "none,ngram,merged", "--temperature", "0.8", *save("sampled")], 10),
    ]


def list_options(args: Namespace, *names: str) -> list[str]:
    """Those options of the command that are set, for its parts."""
    return [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names if getattr(args, name) is not None]


def run_parts(parts: Sequence[Part], folder: Path, device: torch.device) -> dict[str, Any]:
    """Run the parts that the folder's report does not have as done by the same command, and return the report."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = {"machine": describe_machine(device) | {"commit": find_commit()}}
    found = {part["name"]: part for part in read_begun(folder / REPORT, setup, "parts")}
    for part in parts:
        if [found.get(part.name, {}).get(name) for name in ("command", "status")] != [[*part.command], DONE]:
            print(f"{OWN}{part.name}, at most {part.minutes:g} minutes", file=sys.stderr, flush=True)
            found[part.name] = run_part(part, folder)
        report = setup | {"parts": [found[each.name] for each in parts if each.name in found]}
        write_report(folder / REPORT, report)
        page = format_page(report).encode()
        write_aside(folder / PAGE, lambda file, page=page: file.write(page))
    return report


def run_part(part: Part, folder: Path) -> dict[str, Any]:
    """Run a part in a process of its own."""
    log, begun = folder / "part.log", perf_counter()
    try:
        with log.open("w", encoding="utf-8") as output:
            ended = subprocess.run(
                part.command, stdout=output, stderr=subprocess.PIPE, timeout=60 * part.minutes, cwd=ROOT
            )
        errors, status = ended.stderr, DONE if ended.returncode == 0 else f"failed ({ended.returncode})"
    except subprocess.TimeoutExpired as late:
        errors = late.stderr or b""
        status = f"killed after {part.minutes:g} minutes"
    finally:
        text = log.read_text(encoding="utf-8", errors="replace")
        log.unlink()
    return {
        "name": part.name,
        "command": [*part.command],
        "status": status,
        "seconds": round(perf_counter() - begun, 1),
        "output": text.splitlines(),
        "errors": errors.decode(errors="replace").splitlines()[-SHOWN:],
    }


def format_page(report: dict[str, Any]) -> str:
    """Markdown: how each part ended, then what each printed."""
    machine, parts = report["machine"], report["parts"]
    ended = [[each["name"], each["status"], f"{each['seconds']:.0f}"] for each in parts]
    lines = [["part", "ended", "seconds"], *ended]
    known = ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)
    sections = [f"# The first hour\n\n{known}\n\n{to_markdown(lines)}"]
    for part in parts:
        notices = [line for line in part["errors"] if part["status"] != DONE or line.startswith(OWN)]
        text = "\n".join(part["output"][-SHOWN:] + notices)
        sections.append(f"## {part['name']}\n\n```\n{text}\n```")
    return "\n\n".join(sections) + "\n"


def run_first_hour(args: Namespace) -> str:
    """Run all parts for the command's options. Returns the page."""
    folder, options = args.first_hour.resolve(), ModelOptions.from_args(args)
    if options.device_map is not None:
        raise ValueError("--first-hour is for one device; --device chooses it")
    if options.model is not None and Path(options.model).exists():
        args.model = Path(options.model).resolve()  # parts run in another folder
    device = torch.device(options.device or "cuda")
    if find_backend(device).waits and not torch.cuda.is_available():
        raise ValueError("--first-hour measures a GPU, and torch finds none; --device cpu rehearses it")
    return format_page(run_parts(list_parts(args, folder), folder, device))
