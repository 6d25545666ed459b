"""Decodes on one rank of a group of two on the CPU: prints the trees and texts of several proposers as JSON.

    python -m tests.support.two_ranks RANK FILE

Each forward pass of the target takes a random time and ends with a collective operation, as with tensor parallelism:
ranks whose trees have different sizes fail. FILE is new; both ranks meet in it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from random import Random
from time import sleep
from typing import Any

import torch
from torch import distributed

from decode import Proposer, Target, generate, speculate
from decode.models.cost_curve import CostCurve
from proposers import HEAD_PROPOSERS, DraftProposer, MergedProposer, NGramProposer
from tests.support.drafting import Recorder, make_head
from tests.support.models import tiny

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9, 7, 8, 9, 7]]
# By rank. With the second one nothing would be drafted.
CURVES = CostCurve((1, 64), (1.0, 2.0)), CostCurve((1, 64), (1.0, 400.0))

PROPOSERS: dict[str, Callable[[Target], Proposer]] = {
    "ngram": lambda target: NGramProposer(),
    "merged": lambda target: MergedProposer(),
    "eagle3": lambda target: HEAD_PROPOSERS["eagle3"](make_head("eagle3", target)),
    "hydra": lambda target: HEAD_PROPOSERS["hydra"](make_head("hydra", target)),
    "merged eagle3": lambda target: MergedProposer(head=PROPOSERS["eagle3"](target)),
    "draft": lambda target: DraftProposer(Target(tiny("llama", num_hidden_layers=1, dtype=torch.float32))),
}


def couple_ranks(rank: int) -> Callable[..., Any]:
    """A hook of the target that takes a random time and averages the ranks' logits."""
    clock = Random(rank)

    def couple(module: Any, args: Any, output: Any) -> None:
        sleep(clock.random() / 200)
        shapes: list[Any] = [None, None]
        distributed.all_gather_object(shapes, tuple(output.logits.shape))
        assert shapes[0] == shapes[1], f"the ranks verify trees of shapes {shapes}"
        distributed.all_reduce(output.logits)
        output.logits /= 2

    return couple


def decode(rank: int) -> dict[str, Any]:
    """By proposer: the sizes of its trees, and the texts."""
    model = tiny("llama", dtype=torch.float32)
    target = Target(model, deterministic=CURVES[rank])
    model.register_forward_hook(couple_ranks(rank))
    found: dict[str, Any] = {}
    for name, make in PROPOSERS.items():
        recorder = Recorder(make(target))
        answers = generate(target, PROMPTS, recorder, max_new_tokens=24, stop_ids=[])
        found[name] = [tree.sizes.tolist() for tree in recorder.trees], [answer.tokens for answer in answers]
    inputs = torch.tensor([PROMPTS[0]])
    settings: Any = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    recorder = Recorder(NGramProposer())
    settings |= {"custom_generate": speculate, "proposer": recorder, "deterministic": CURVES[rank]}
    tokens = model.generate(inputs, **settings)
    found["speculate"] = [tree.sizes.tolist() for tree in recorder.trees], tokens.tolist()
    return found


def main() -> None:
    rank, file = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    print(json.dumps(decode(rank)))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
