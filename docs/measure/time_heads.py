"""How long a pass of a new head takes, next to a pass of the model over one token.

    python -m docs.measure.time_heads [--model MODEL] [--context N] [--repeats N]

Heads have random weights of the model's sizes. All are timed in turns, in one process; the medians are printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from decode import Target, Tree
from heads import LayerCache
from proposers.dflash import DFlashDrafter
from proposers.eagle import EagleDrafter, draft_ahead
from proposers.fast_heads import pack_head
from proposers.feature_history import FeaturePart, attend_like_target
from scripts.benchmark.rows import to_markdown
from training.data import Example
from training.factory import make_head

CASES: list[tuple[str, int, dict[str, Any]]] = [
    *(("dflash", rows, {"layers": layers}) for layers in (1, 2, 3) for rows in (8192, 49_152)),
    *((kind, 8192, {}) for kind in ("peagle", "eagle3", "mtp")),
]


def make_pass(target: Target, kind: str, rows: int, context: int, shape: dict[str, Any]) -> Callable[[], object]:
    """What one draft of a head does after a text, for EAGLE heads one level of it."""
    example = Example(tuple(range(3, 67)), ((1, 64),))
    head: Any = pack_head(make_head(kind, target, [example], rows, False, **shape))
    cache, embed = LayerCache(1, attend_like_target), target.model.get_input_embeddings()
    states, positions = torch.randn(1, context, head.hidden_size), torch.arange(context)[None]
    if kind == "dflash":
        cache.write(*head.read(states, positions))
        cache.keep([context])
        return lambda: DFlashDrafter(head, torch.tensor([5]), cache, embed).logits(0)
    head(embed(torch.zeros(1, context, dtype=torch.long)), states, positions, cache.attend)
    cache.keep([context])
    if kind == "peagle":
        one = torch.tensor([1])
        part, unknown = FeaturePart(states[:, :1], one[:, None], one, [1]), head.unknown(head.depth - 1)

        def draft() -> object:
            cache.crop([context])
            return head.logits(draft_ahead(head, embed, cache, part, *unknown))

        return draft

    def draft_level() -> object:
        drafter = EagleDrafter(head, states[:, 0], cache, embed)
        drafter.extend(torch.tensor([[0]]), torch.tensor([[5]]))
        return drafter.logits(1)

    return draft_level


def make_model_pass(target: Target, context: int) -> Callable[[], object]:
    session = target.open(1)
    session.extend([list(range(3, 3 + context))])

    def verify() -> None:
        session.verify(Tree.chain([[7]]))
        session.keep([[]])

    return verify


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    target = Target.load(options.model)
    passes = {"the model, one token": make_model_pass(target, options.context)}
    for kind, rows, shape in CASES:
        name = ", ".join([kind, *(f"{value} {key}" for key, value in shape.items()), f"{rows:,} output rows"])
        passes[name] = make_pass(target, kind, min(rows, target.vocabulary), options.context, shape)
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    with torch.inference_mode():
        for _ in range(options.repeats):
            for name, run in passes.items():
                started = perf_counter()
                run()
                seconds[name].append(perf_counter() - started)
    whole = median(seconds["the model, one token"])
    rows = [[name, f"{1e3 * median(each):.1f}", f"{median(each) / whole:.0%}"] for name, each in seconds.items()]
    print(to_markdown([["pass", "ms", "of the model's"], *rows]))


if __name__ == "__main__":
    main()
