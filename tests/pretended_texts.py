"""Texts on the pretended GPU compared with the CPU's: prints the cases that differ, as JSON. Needs no GPU.

python -m tests.pretended_texts
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from decode import Proposer, Sampling, Step, Target, Tree, generate
from decode.models.cost_curve import CostCurve
from proposers import DraftProposer, EagleProposer, HydraProposer, MedusaProposer, NGramProposer
from tests.drafting import make_head
from tests.models import VOCABULARY, tiny
from tests.pretended_cuda import pretend, to_cuda
from tests.test_lossless import Adversary

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9, 10, 11, 7, 8], [4, 4, 20, 21, 22, 4, 4, 20]]
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}]
LIMITS = {"max_new_tokens": 16, "stop_ids": range(0, VOCABULARY, 23)}  # rows finish at different times


class OnDevice:
    """Another proposer's trees, moved to the target's device and spoilt there."""

    def __init__(self, inner: Proposer, spoil: Callable[[Tree], Tree] = lambda tree: tree) -> None:
        self.inner, self.layers, self.spoil = inner, inner.layers, spoil

    def propose(self, step: Step, budget: int) -> Tree:
        return self.spoil(self.inner.propose(step, budget).to(step.target.device))


def spoil_root(tree: Tree) -> Tree:
    return tree.with_tensors({"tokens": (tree.tokens + 1) * (torch.arange(tree.width, device="cuda") == 0)})


def spoil_token(tree: Tree) -> Tree:
    return tree.with_tensors({"tokens": torch.where(tree.parents == 0, VOCABULARY + 5, tree.tokens)})


def spoil_parent(tree: Tree) -> Tree:
    return Tree(tree.tokens, torch.where(tree.parents == 0, 50, tree.parents), tree.sizes, tree.height)


def spoil_height(tree: Tree) -> Tree:
    return Tree(tree.tokens, tree.parents, tree.sizes, height=1)


SPOILT = {
    "outside the vocabulary": spoil_token,
    "parent before itself": spoil_parent,
    "deeper than its height": spoil_height,
}


def make_target(kind: str, cuda: bool) -> Target:
    model = tiny(kind)
    target = Target(to_cuda(model) if cuda else model)
    target.cost_curve = lambda *_: CostCurve((1, 64), (1.0, 1.05))  # type: ignore[method-assign]
    return target


def make_proposers(target: Target) -> dict[str, Proposer]:
    def head(kind: str, **settings: Any) -> Any:
        return to_cuda(make_head(kind, target, **settings))

    return {
        "ngram": NGramProposer(length=4),
        "draft": DraftProposer(target, length=3),
        "draft tree": DraftProposer(target, width=2, length=2),
        "medusa": MedusaProposer(head("medusa"), nodes=9),
        "hydra": HydraProposer(head("hydra", prefix=True), nodes=9),
        "eagle": EagleProposer(head("eagle"), depth=3, tree="static", nodes=9),
        "eagle3": EagleProposer(head("eagle3"), depth=3, nodes=12),
        "eagle3 adaptive": EagleProposer(head("eagle3"), depth=4),
        "garbage": OnDevice(Adversary(1)),
        "wrong root": OnDevice(NGramProposer(length=1), spoil_root),
    }


def list_differences() -> Iterator[str]:
    for kind in ("llama", "gemma3_text"):
        target, cpu = make_target(kind, cuda=True), make_target(kind, cuda=False)
        for settings in SAMPLINGS:
            sampling = Sampling(**settings)
            expected = [answer.tokens for answer in generate(cpu, PROMPTS, sampling=sampling, **LIMITS)]
            for name, proposer in {"plain": None, **make_proposers(target)}.items():
                for batch_size in (1, 3):
                    answers = generate(target, PROMPTS, proposer, sampling=sampling, batch_size=batch_size, **LIMITS)
                    if [answer.tokens for answer in answers] != expected:
                        yield f"{kind}, {name}, {settings}, batch {batch_size}"


def list_accepted_faults() -> Iterator[str]:
    """Faulty trees that raise another error than on a CPU, or none."""
    target = make_target("llama", cuda=True)
    for message, spoil in SPOILT.items():
        try:
            generate(target, PROMPTS, OnDevice(NGramProposer(length=4), spoil), **LIMITS)
        except ValueError as error:
            if message not in str(error):
                yield f"{message}: {error}"
        else:
            yield f"{message}: no error"


if __name__ == "__main__":
    torch.set_num_threads(1)
    with pretend():
        print(json.dumps([*list_differences(), *list_accepted_faults()]))
