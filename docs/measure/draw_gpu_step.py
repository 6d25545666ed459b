"""Draws pictures/gpu-step.svg: what host and device do in a step, from launches counted on the simulated device.

python docs/measure/draw_gpu_step.py
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DOCS.parent))

import torch  # noqa: E402

from docs.measure.count_gpu_steps import CAPTURED, list_steps  # noqa: E402
from draftless_commands.shared.results import COLOURS, GREYS, INK, save_figure  # noqa: E402
from tests.support.simulated_cuda import GRAPH, LAUNCH, UPLOAD, WAIT, Event, recorded_graphs, simulate  # noqa: E402

METHODS = {"ngram sampling": "n-grams, batch 8, sampling", "eagle3": "EAGLE-3, 60 nodes, batch 1"}
FORMS = {"auto": "launch by launch", "graphs": 'accelerate="graphs"'}
COPY, DRAFT, OWN, TARGET, ONE_GRAPH = "copy", "drafting", "check, masks, acceptance", "the target's pass", "graph"
COLOUR = dict(zip((COPY, DRAFT, OWN, TARGET, ONE_GRAPH), (INK, *COLOURS), strict=False))
KERNEL = 1 / 3  # of a launch: not measured, but small kernels are shorter than their launches
Part = tuple[str, int, int]  # name, launches of the host, kernels of the device


def list_parts(events: list[Event]) -> list[Part]:
    """A step's launches, those of one kind together, in order."""
    drafted = max((place for place, event in enumerate(events) if is_draft(event)), default=0)
    named = [(name_part(event, place <= drafted), event) for place, event in enumerate(events) if event.kind == LAUNCH]
    parts = []
    for name, group in groupby(named, key=lambda pair: pair[0]):
        ops = [event.op for _, event in group]
        kernels = [int(op.removeprefix(GRAPH)) if op.startswith(GRAPH) else 1 for op in ops]
        parts.append((name, len(ops), sum(kernels)))
    return parts


def name_part(event: Event, before_drafted: bool) -> str:
    if event.op.startswith(GRAPH):
        return ONE_GRAPH
    if event.lines.startswith(("decode/devices/transfer", "decode/cuda/graph")):
        return COPY
    return TARGET if event.in_target else DRAFT if before_drafted else OWN


def is_draft(event: Event) -> bool:
    return any(line.startswith(("proposers/", "heads/")) for line in event.lines.split(" < "))


def draw_lanes(axes: Any, parts: list[Part]) -> None:
    """The host's lane above the device's, which runs each kernel once it is launched and the one before has ended."""
    host, device = 0, 0.0
    for name, launches, kernels in parts:
        width, spans = KERNEL * kernels / launches, []
        axes.barh(1, launches, left=host, height=0.7, color=COLOUR[name])
        for _ in range(launches):
            host += 1
            begin = max(host, device)
            spans.append((begin, width))
            device = begin + width
        axes.broken_barh(spans, (-0.35, 0.7), color=COLOUR[name], linewidth=0, rasterized=True)
    axes.barh(1, device - host, left=host, height=0.7, color="white", edgecolor=GREYS[1], hatch="////", linewidth=0)
    axes.annotate(f"{host} launches, 1 wait", (device, 1), (6, 0), textcoords="offset points", va="center")
    axes.set_yticks([1, 0], ["host", "device"])
    axes.spines[["top", "right"]].set_visible(False)


def check(events: list[Event]) -> None:
    """Raise ValueError if there is not one copy to the device and one wait, as the picture says."""
    if [sum(event.kind == kind for event in events) for kind in (UPLOAD, WAIT)] != [1, 1]:
        raise ValueError("a step has more than one copy to the device or more than one wait")


def main() -> None:
    torch.set_num_threads(1)
    with simulate(), recorded_graphs():
        steps = {(name, form): list_steps(name, form, CAPTURED)[-1] for name in METHODS for form in FORMS}
    with save_figure(DOCS / "pictures" / "gpu-step.svg", 9, 6, 11) as figure:
        panes = figure.subplots(len(steps), sharex=True)
        for axes, ((method, form), events) in zip(panes, steps.items(), strict=True):
            check(events)
            draw_lanes(axes, list_parts(events))
            axes.set_title(f"{METHODS[method]}: {FORMS[form]}", loc="left", fontsize=11)
        handles = [panes[0].bar(0, 0, color=colour, label=name) for name, colour in COLOUR.items()]
        handles.append(panes[0].bar(0, 0, color="white", edgecolor=GREYS[1], hatch="////", label="waiting"))
        figure.legend(handles=handles, frameon=False, ncols=3, loc="outside upper left")
        panes[-1].set(xlim=(0, 760), xlabel="time, in launches of the host (a kernel is drawn as a third of one)")


if __name__ == "__main__":
    main()
