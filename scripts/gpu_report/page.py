"""The Markdown page of a GPU report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heads.atomic_write import write_aside
from scripts.benchmark.pass_report import format_passes
from scripts.benchmark.plot import name_processor
from scripts.benchmark.tables import to_markdown

FLOOR_NOTE = """The floor is the time of reading the weights and the committed keys and values once, at the bandwidth of
a copy. Tokens/s are those of passes over one node of each row, without the rest of the loop."""
STEP_NOTE = """Per step of one text, by torch.profiler. Tokens/s were measured before, without it. The device is busy
while a kernel or a copy runs; gaps are the rest of the time."""


def write_page(path: Path, report: Mapping[str, Any]) -> None:
    content = (format_page(report) + "\n").encode()
    write_aside(path, lambda file: file.write(content))


def format_page(report: Mapping[str, Any]) -> str:
    """The whole report as Markdown."""
    machine, settings = report["machine"], report["settings"]
    parts = [f"# GPU report: {name_processor(machine)}"]
    if machine["gpu"] is None:
        parts.append("**No GPU: this only shows that the command works.**")
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}, commit {settings['commit']}"
    parts.append(f"{settings['dtype']}, {versions}, {machine['cpu']}, {machine['os']}.")
    speed = f"{machine['bytes_per_second'] / 1e9:.0f} GB/s"
    parts.append(f"Times are medians of {settings['repeats']}. Copies in memory: {speed}.")
    parts += ["## Tests", format_tests(report["tests"])]
    for model in report["models"]:
        parts += [f"## {model['name']}", format_sizes(model)]
        if model["passes"]:
            parts += [format_passes(model), format_floors(model)]
        parts.append(format_steps(model))
    if report["missing"]:
        parts += ["## Left out", "\n".join(f"- {reason}" for reason in report["missing"])]
    return "\n\n".join(parts)


def format_tests(tests: Mapping[str, Any]) -> str:
    counts = [f"{tests[kind]} {kind}" for kind in ("passed", "failed", "error", "skipped") if kind in tests]
    line = f"`{tests['command']}`: {', '.join(counts) or 'no result'}, in {tests['seconds']:.0f} seconds."
    return line + (f"\n\n```text\n{tests['output'].strip()}\n```" if tests["output"] else "")


def format_sizes(model: Mapping[str, Any]) -> str:
    weights, cache = model["weight_bytes"] / 1e9, model["cache_bytes_per_token"] / 1024
    return f"A pass reads {weights:.2f} GB of weights, and {cache:.1f} KiB of keys and values a committed token."


def format_floors(model: Mapping[str, Any]) -> str:
    head = ["context", "batch", "floor ms", "pass ms", "floor / pass", "tokens/s", "64 nodes / 1"]
    rows = [
        [
            *(str(entry[name]) for name in ("context", "batch")),
            *(f"{entry[name]:.2f}" for name in ("floor_ms", "pass_ms")),
            f"{100 * entry['share_of_bandwidth']:.0f} %",
            f"{entry['tokens_per_second']:.1f}",
            f"{entry['largest_over_single']:.2f}",
        ]
        for entry in model["floors"]
    ]
    return f"{FLOOR_NOTE}\n\n{to_markdown([head, *rows])}"


def format_steps(model: Mapping[str, Any]) -> str:
    head = ["method", "tokens/s", "tokens a step", "launches", "copies", "waits", "busy ms", "gaps ms"]
    formats = {"launches": ".0f", "copies": ".1f", "waits": ".1f", "busy_ms": ".2f", "gaps_ms": ".2f"}
    rows = [
        [
            step["method"],
            f"{step['tokens_per_second']:.1f}",
            f"{step['tau']:.2f}",
            *("-" if step[name] is None else format(step[name], shape) for name, shape in formats.items()),
        ]
        for step in model["steps"]
    ]
    return f"{STEP_NOTE}\n\n{to_markdown([head, *rows])}"
