"""bench.py --gpu-report: the tests, the passes, the bandwidth floor and a step on the GPU at hand."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from decode import Proposer, Target
from proposers import NGramProposer, load_proposer
from scripts.benchmark.files import ROOT, describe_machine, find_commit, write_report
from scripts.benchmark.options import PASS_ROUNDS
from scripts.benchmark.pass_report import sum_up_passes
from scripts.benchmark.passes import choose_contexts, time_passes
from scripts.gpu_report.bandwidth import compare_with_floor, count_cache_bytes, measure_bandwidth
from scripts.gpu_report.models import Subject, load_subjects, with_dtype
from scripts.gpu_report.page import write_page
from scripts.gpu_report.step_profile import profile_step
from scripts.shared.command import check_writable
from scripts.shared.options import ModelOptions, Options

CONTEXTS, BATCH_SIZES = (256, 4096, 32_768), (1, 4, 16)
TESTS = ("-m", "pytest", "-q", "-m", "gpu", "tests/decode/gpu/test_gpu.py")
METHODS: dict[str, Callable[[Target], Proposer | None]] = {
    "none": lambda target: None,
    "ngram, 16 nodes": lambda target: NGramProposer(length=15),
    "eagle3, 60 nodes": lambda target: load_proposer("eagle3", target, nodes=60),
}
FOR_DEFAULT = "eagle3, 60 nodes"  # its head was trained for the default model


@dataclass(frozen=True)
class GpuOptions(Options):
    """Where to measure, and where to write. Raises ValueError without a GPU, unless the CPU is asked for."""

    model: ModelOptions
    page: Path
    repeats: int = PASS_ROUNDS

    @classmethod
    def from_args(cls, args: argparse.Namespace, **others: Any) -> GpuOptions:
        page = args.gpu_report
        check_writable(page, "--gpu-report")
        if page.suffix != ".md":
            raise ValueError(f"--gpu-report {page} must end in .md; the JSON gets the same name with .json")
        if args.device_map is not None:
            raise ValueError("--gpu-report measures one GPU; choose it by --device, not by --device-map")
        if args.device is None and not torch.cuda.is_available():
            raise ValueError(
                "--gpu-report needs a GPU, and torch sees none here; with --device cpu the command only shows that it "
                "works, with a tiny shape in place of the large one"
            )
        model = with_dtype(ModelOptions.from_args(args))
        return super().from_args(args, model=model, page=page, repeats=args.repeats or cls.repeats, **others)


def run_gpu_report(options: GpuOptions) -> dict[str, Any]:
    """Measure everything, write the page and its JSON, and return the report."""
    missing: list[str] = []
    measured: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    bandwidth = 0.0
    for subject in load_subjects(options.model, missing):
        if not machine:
            machine, bandwidth = describe_machine(subject.target.device), measure_bandwidth(subject.target.device)
        measured.append(measure_subject(subject, options.repeats, bandwidth, missing))
        del subject  # its memory is for the next one
    report = {
        "settings": {"dtype": options.model.dtype, "repeats": options.repeats, "commit": find_commit()},
        "machine": {**machine, "bytes_per_second": bandwidth},
        "tests": run_tests(),
        "models": measured,
        "missing": missing,
    }
    write_report(options.page.with_suffix(".json"), report)
    write_page(options.page, report)
    return report


def run_tests() -> dict[str, Any]:
    """The outcome of the tests that need a GPU: counts, and the last lines if some failed."""
    begun = perf_counter()
    done = subprocess.run([sys.executable, *TESTS], cwd=ROOT, capture_output=True, text=True)
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    output = "" if done.returncode == 0 else (done.stdout + done.stderr)[-4000:]
    return {"command": " ".join(("python", *TESTS)), **counts, "seconds": perf_counter() - begun, "output": output}


def measure_subject(subject: Subject, repeats: int, bandwidth: float, missing: list[str]) -> dict[str, Any]:
    """The passes, floors and steps of one model. What its memory or context does not allow is noted in `missing`."""
    target, contexts = subject.target, choose_contexts(subject.target.context, CONTEXTS)
    passes: list[dict[str, Any]] = []
    missing += [f"{subject.name}: {context} tokens exceed its context" for context in CONTEXTS[len(contexts) :]]
    for context, batch in product(contexts, BATCH_SIZES):
        try:
            entries = time_passes({str(target.dtype)[6:]: target}, [context], {}, repeats, [batch])
        except torch.OutOfMemoryError:
            missing.append(f"{subject.name}: {context} tokens of context in a batch of {batch} do not fit into memory")
        else:
            passes += sum_up_passes(entries)
    cache_bytes = count_cache_bytes(subject)
    methods = [name for name in METHODS if subject.is_default or name != FOR_DEFAULT]
    return {
        "name": subject.name,
        "weight_bytes": subject.weight_bytes,
        "cache_bytes_per_token": cache_bytes,
        "passes": passes,
        "floors": [compare_with_floor(entry, subject, cache_bytes, bandwidth) for entry in passes],
        "steps": [{"method": name, **profile_step(target, METHODS[name](target))} for name in methods],
    }
