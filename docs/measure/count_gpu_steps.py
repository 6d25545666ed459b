"""What a decoding step would do on a GPU: waits of the host, copies to the device and launches. Needs no GPU.

    python -m docs.measure.count_gpu_steps [METHOD ...] [--lines] [--json]

The model is a Llama of 4 layers with grouped queries, on the simulated device of `tests.support.simulated_cuda`. It is
accelerated by "packed" and by "graphs".
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from decode import Proposer, Sampling, Target, stream
from decode.devices.cost_curve import CostCurve
from proposers import HEAD_PROPOSERS, NGramProposer
from tests.support.drafting import make_head
from tests.support.models import tiny
from tests.support.simulated_cuda import (
    LAUNCH,
    PAGEABLE,
    UPLOAD,
    WAIT,
    Event,
    record,
    recorded_graphs,
    simulate,
    to_cuda,
    watch_target,
)

SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
STEADY = 3  # the first steps allocate
CAPTURED = 24  # steps until each number of nodes has a graph


def make_eagle3(target: Target, **settings: Any) -> Proposer:
    return HEAD_PROPOSERS["eagle3"](to_cuda(make_head("eagle3", target)), **settings).prepare(target)


def make_adaptive(target: Target) -> Proposer:
    """EAGLE-3 whose trees have any size and as many levels as they may: the most work."""
    proposer: Any = make_eagle3(target)
    proposer.draft_budget.choose_depth = lambda most: most
    proposer.draft_budget.is_backing_off = lambda: False
    return proposer


# Each method's proposer, rows and sampling.
METHODS: dict[str, tuple[Callable[[Target], Proposer | None], int, dict[str, Any]]] = {
    "plain": (lambda target: None, 1, {}),
    "eagle3": (lambda target: make_eagle3(target, nodes=60), 1, {}),
    "eagle3 adaptive": (make_adaptive, 1, {}),
    "ngram sampling": (lambda target: NGramProposer(length=15), 8, SAMPLED),
    "eagle3 sampling": (lambda target: make_eagle3(target, nodes=16), 8, SAMPLED),
}


def make_target(accelerate: str) -> Target:
    target = Target(to_cuda(tiny("llama", dtype=torch.float32, num_hidden_layers=4)), accelerate=accelerate)
    # Measured times would be a CPU's. More nodes cost a GPU nearly nothing.
    curve = CostCurve((1, 64), (1.0, 1.05))
    target.warm_up = lambda *_: None  # type: ignore[method-assign]
    target.cost_curve = lambda *_: curve.padded if accelerate == "graphs" else curve  # type: ignore[method-assign]
    watch_target(target.model)
    return target


def make_prompts(rows: int) -> list[list[int]]:
    return [[5, 6, 7, 8] * (2 + row % 3) + [5 + row] + [5, 6] for row in range(rows)]


def list_steps(method: str, accelerate: str = "packed", count: int = STEADY + 2) -> list[list[Event]]:
    """The events of the first steps, in which no row finishes. A graph counts as one launch."""
    make, rows, sampling = METHODS[method]
    target = make_target(accelerate)
    proposer = make(target)
    steps: list[list[Event]] = []
    settings = {"sampling": Sampling(**sampling), "max_new_tokens": 200, "stop_ids": [], "text": False}
    with record() as log:
        for chunk in stream(target, make_prompts(rows), proposer, **settings):
            if chunk.request_id == 0:
                steps.append(log[:])
                log.clear()
                if len(steps) > count:
                    break
    return steps


def count_events(events: list[Event]) -> dict[str, int]:
    """Waits, copies to the device, launches of our own and of the target, and keys or values repeated in memory."""
    own = Counter(event.kind for event in events if not event.in_target)
    target = Counter(event.kind for event in events if event.in_target)
    return {
        "waits": own[WAIT] + target[WAIT],
        "copies": own[UPLOAD] + own[PAGEABLE],
        "pageable": own[PAGEABLE],
        "launches": own[LAUNCH],
        "target": target[LAUNCH],
        "repeated": sum(event.op == "aten::clone" and is_grouped(event) for event in events),
    }


def is_grouped(event: Event) -> bool:
    """Whether an op's input has a dimension for the queries that share keys and values: [B, groups, queries, S, D]."""
    return any(len(shape) == 5 for shape in event.shapes)


def count_method(method: str) -> dict[str, int]:
    """The largest counts of a steady step. "graphs": all launches of steps that capture no graph."""
    counts = [count_events(events) for events in list_steps(method)[STEADY:]]
    graphs = [count_events(events) for events in list_steps(method, "graphs", CAPTURED + 3)[CAPTURED:]]
    graphs = [counts for counts in graphs if not counts["target"]]  # the others have a size that is new
    largest = {name: max(each[name] for each in counts) for name in counts[0]}
    largest["waits"], largest["copies"] = (max(each[name] for each in counts + graphs) for name in ("waits", "copies"))
    return largest | {"graphs": max(each["launches"] for each in graphs)}


def list_lines(events: list[Event]) -> list[str]:
    """What waits and copies, by line, and how many launches each file has."""
    causes = Counter((event.kind, event.op, event.lines) for event in events if event.kind != LAUNCH)
    files = Counter(event.lines.split(":")[0] for event in events if event.kind == LAUNCH and not event.in_target)
    launches = Counter(event.lines.split(" ")[0] for event in events if event.kind == LAUNCH and not event.in_target)
    return [
        *(f"  {count} {' '.join(cause)}" for cause, count in causes.most_common()),
        *(f"  {count} launches in {file}" for file, count in files.most_common()),
        *(f"    {count} launches at {line}" for line, count in launches.most_common(40)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"of {', '.join(METHODS)} (default: all)")
    parser.add_argument("--lines", action="store_true", help="also name the lines that wait, copy and launch")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with simulate(), recorded_graphs():
        counts = {method: count_method(method) for method in options.methods or METHODS}
        lines = {method: list_lines(list_steps(method, "packed")[-1]) for method in counts} if options.lines else {}
    if options.json:
        print(json.dumps(counts))
        return
    columns = ["synchronizations", "copies to the device", "pageable", "own launches", "the target's"]
    columns += ["repeated K or V", "all with graphs"]
    print(f"| a step of | {' | '.join(columns)} |")
    print(f"|---|{'--:|' * len(columns)}")
    for method, each in counts.items():
        print(f"| {method} | {' | '.join(str(count) for count in each.values())} |")
        if method in lines:
            print("\n".join(lines[method]))


if __name__ == "__main__":
    main()
