"""Measuring how long a model takes to start, and its memory, each time in a process of its own.

A report's `starts` has an entry for each `kind` of start: transformers alone, the first start on a machine, and a later
one. Its `samples`, one for each process, have the seconds after the imports until the model was `loaded` and until it
was `ready`, its first token chosen. Their bytes are those beyond the imports': `peak` of all resident memory, mapped
files included, and what was `private` in the end, without them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from decode import generate
from decode.models.default_model import default_model
from scripts.benchmark.files import ROOT, describe_machine, find_commit, write_report
from scripts.benchmark.options import BenchOptions, name_model
from scripts.benchmark.tables import SAMPLE
from scripts.shared.command import check_writable
from scripts.shared.options import ModelOptions, Options, load_model_only, load_target

STATUS = Path("/proc/self/status")
STOCK, FIRST, LATER = "transformers", "first start", "later start"  # FIRST: nothing is in the cache yet


@dataclass(frozen=True)
class StartOptions(Options):
    """Which model is started, and how often."""

    model: ModelOptions
    repeats: int = BenchOptions.repeats
    threads: int | None = None
    json: Path | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace, **others: Any) -> StartOptions:
        """The parsed options. Raises ValueError for a file that cannot be written, and on systems other than Linux."""
        check_writable(args.json, "--json")
        if not STATUS.exists():
            raise ValueError(f"--start reads memory from {STATUS}, which only Linux has")
        found = {"model": ModelOptions.from_args(args), "repeats": args.repeats or cls.repeats}
        return super().from_args(args, **found, **others)


def run_starts(options: StartOptions) -> dict[str, Any]:
    """Measure everything and return the report, also written to `options.json` if given."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = replace(options.model, device=options.model.device or "cpu")
    if model.model is None:
        model = replace(model, model=str(default_model()))  # it is not made again in an empty cache
    samples: dict[str, list[dict[str, float]]] = {STOCK: [], FIRST: [], LATER: []}
    described = _start(STOCK, model, {})  # it also reads the files, so that the others find them in memory
    del described["sample"]
    with tqdm(total=3 * options.repeats, unit="start", disable=None) as bar:
        for _ in range(options.repeats):
            with TemporaryDirectory() as cache:
                for kind, found in samples.items():
                    found.append(_start(kind, model, make_places(cache))["sample"])
                    bar.update()
    report = {
        "settings": {
            "model": name_model(options.model),
            "accelerate": options.model.accelerate,
            "repeats": options.repeats,
            "commit": find_commit(),
        },
        "machine": {**describe_machine(torch.device(str(model.device))), **described},
        "starts": [{"kind": kind, "samples": found} for kind, found in samples.items()],
    }
    if options.json is not None:
        write_report(options.json, report)
    return report


def make_places(cache: str) -> dict[str, str]:
    """The environment in which everything that is compiled or measured once is kept in a folder."""
    return {"XDG_CACHE_HOME": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}


def _start(kind: str, model: ModelOptions, places: Mapping[str, str]) -> dict[str, Any]:
    """What a new process measures, in an environment with these folders. Raises ValueError if it fails."""
    asked = json.dumps({"ours": kind != STOCK, "model": asdict(model), "threads": torch.get_num_threads()})
    command = [sys.executable, "-m", "scripts.benchmark.starts", asked]
    environment = {**os.environ, **places, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode:
        raise ValueError(f"a process that loads the model failed: {ended.stderr.strip().splitlines()[-1:]}")
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def measure_start(model: ModelOptions, ours: bool) -> dict[str, Any]:
    """Load a model in this process, with this project or with transformers alone, and choose one token."""
    before, begun = _read_memory(), perf_counter()
    if ours:
        target = load_target(model)
        loaded, network = perf_counter() - begun, target.model
        target.warm_up()
        generate(target, [[0]], None, max_new_tokens=1)
    else:
        network, _ = load_model_only(model, "off")
        loaded = perf_counter() - begun
        with torch.inference_mode():
            network(torch.zeros(1, 1, dtype=torch.long, device=network.device))
    ready, after = perf_counter() - begun, _read_memory()
    peak, private = after["VmHWM"] - before["VmRSS"], after["RssAnon"] - before["RssAnon"]
    sample = dict(zip(SAMPLE, (loaded, ready, peak, private), strict=True))
    weights = sum(weight.nbytes for weight in network.parameters())  # transformers': ours are packed
    return {"sample": sample, "dtype": str(network.dtype).removeprefix("torch."), "weights": weights}


def _read_memory() -> dict[str, int]:
    """The process's memory in bytes by the names of Linux. A child's `getrusage` would include its parent's peak."""
    lines = (line.split() for line in STATUS.read_text().splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if words[-1:] == ["kB"]}


def main(argv: Sequence[str]) -> None:
    """Print one measurement as JSON: the work of a process that `_start` makes."""
    asked = json.loads(argv[0])
    torch.set_num_threads(asked["threads"])
    print(json.dumps(measure_start(ModelOptions(**asked["model"]), asked["ours"])))


if __name__ == "__main__":
    main(sys.argv[1:])
