"""Where the milliseconds of a forward pass go, by the number of nodes.

    python -m docs.measure.profile_pass [--context N] [--passes N]

For the default model in float32 on a CPU, with compiled layers. Prints medians; the parts add up to the pass but for
rounding. Idle machines only: a pass is short.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from decode import Target
from decode.cpu.compiled_layers import compiled_layers
from decode.models.cost_curve import fill, random_chain, time_pass

NODES = 1, 4, 8, 16
LINEAR, ATTENTION = "draftless::linear", "draftless::attention"
PARTS = "linear layers", "output layer", "attention", "fused operators", "all else"


def time_calls(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The function, which adds the time of each call to a list."""

    def timed(*args: Any) -> Any:
        begun = perf_counter()
        result = function(*args)
        seconds.append(perf_counter() - begun)
        return result

    return timed


@torch.inference_mode()
def profile_passes(target: Target, nodes: int, context: int, passes: int, in_layers: list[float]) -> dict[str, float]:
    """The median seconds of each part, and of whole passes. in_layers: the time of each call of a layer's kernel."""
    session, tree = fill(target.open(1), context), random_chain(nodes, 1, target)
    time_pass(session, tree)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(passes):
        in_layers.clear()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            whole = time_pass(session, tree)
        events = [event for event in profiled.events() if event.name in (LINEAR, ATTENTION)]
        *linear, output = [event.time_range.elapsed_us() / 1e6 for event in events if event.name == LINEAR]
        attention = sum(event.time_range.elapsed_us() / 1e6 for event in events if event.name == ATTENTION)
        fused = sum(in_layers) - sum(linear) - attention
        parts = sum(linear), output, attention, fused, whole - output - sum(in_layers)
        for name, part in zip((*PARTS, "whole pass"), (*parts, whole), strict=True):
            found[name].append(part)
    return {name: median(parts) for name, parts in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--context", type=int, default=256, help="committed tokens")
    parser.add_argument("--passes", type=int, default=25)
    args = parser.parse_args()
    target, in_layers = Target.load(dtype=torch.float32), list[float]()
    for layer in compiled_layers(target.model):
        layer._kernel = time_calls(layer._kernel, in_layers)
    columns = [profile_passes(target, nodes, args.context, args.passes, in_layers) for nodes in NODES]
    print(f"| part | {' | '.join(f'{nodes} nodes' for nodes in NODES)} |\n|---|{'---:|' * len(NODES)}")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(f'{1000 * column[name]:.1f}' for column in columns)} |")


if __name__ == "__main__":
    main()
