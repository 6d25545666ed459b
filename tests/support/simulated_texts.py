"""Texts on the simulated GPU compared with the CPU's: prints the cases that differ, as JSON. Needs no GPU.

python -m tests.support.simulated_texts [--graphs] [--model llama|gemma3_text]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from decode import Engine, Proposer, Request, Sampling, Step, Target, Tree, generate
from decode.cuda import graph
from decode.devices.cost_curve import CostCurve
from proposers import (
    DFlashProposer,
    DraftProposer,
    EagleProposer,
    FlashMapProposer,
    HydraProposer,
    JumpProposer,
    MedusaProposer,
    MergedProposer,
    MultiTokenProposer,
    NGramProposer,
    PEagleProposer,
)
from tests.decode.test_broken_drafts import PaddedTrees
from tests.decode.test_lossless import Adversary
from tests.support.drafting import Recorder, make_head
from tests.support.models import VOCABULARY, tiny
from tests.support.simulated_cuda import recorded_graphs, simulate, to_cuda

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9, 10, 11, 7, 8], [3], [4, 4, 20, 21, 22, 4, 4, 20]]
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}]
MODELS = "llama", "gemma3_text"
GRAPH_CASES = {"plain", "ngram", "hydra", "eagle", "eagle3", "eagle3 adaptive", "garbage", "wrong root"}
REUSING = {"plain", "ngram", "medusa", "eagle3"}
LIMITS = {"max_new_tokens": 16, "stop_ids": range(0, VOCABULARY, 23)}  # rows finish at different times


class OnDevice:
    """Another proposer's trees, moved to the target's device and spoilt there."""

    def __init__(self, inner: Proposer, spoil: Callable[[Tree], Tree] = lambda tree: tree) -> None:
        self.inner, self.layers, self.spoil = inner, inner.layers, spoil

    def propose(self, step: Step, budget: int) -> Tree:
        return self.spoil(self.inner.propose(step, budget).to(step.target.device))


def spoil_root(tree: Tree) -> Tree:
    return tree.with_tensors({"tokens": (tree.tokens + 1) * (torch.arange(tree.width, device="cuda") == 0)})


SPOILT: dict[str, Callable[[Tree], Tree]] = {
    "outside the vocabulary": lambda tree: replace(
        tree, tokens=torch.where(tree.parents == 0, VOCABULARY + 5, tree.tokens)
    ),
    "parent before itself": lambda tree: replace(tree, parents=torch.where(tree.parents == 0, 50, tree.parents)),
    "deeper than its height": lambda tree: replace(tree, height=1),
}


def make_target(kind: str, cuda: bool, accelerate: str = "off") -> Target:
    model = tiny(kind)
    target = Target(to_cuda(model), accelerate=accelerate) if cuda else Target(model)
    target.cost_curve = lambda *_: CostCurve((1, 64), (1.0, 1.05))  # type: ignore[method-assign]
    target.warm_up = lambda *_: None  # type: ignore[method-assign]  # nothing is measured
    return target


def make_proposers(target: Target) -> dict[str, Proposer]:
    def head(kind: str, **settings: Any) -> Any:
        return to_cuda(make_head(kind, target, **settings))

    return {
        "ngram": NGramProposer(length=4),
        "draft": DraftProposer(target, depth=3, nodes=4),
        "draft tree": DraftProposer(target, width=2, depth=2, nodes=5),
        "draft adaptive": DraftProposer(target, width=2, depth=4),
        "merged draft": MergedProposer(drafter=DraftProposer(target, width=2, depth=3), nodes=9),
        "medusa": MedusaProposer(head("medusa"), nodes=9),
        "hydra": HydraProposer(head("hydra", prefix=True), nodes=9),
        "eagle": EagleProposer(head("eagle"), depth=3, nodes=9),
        "eagle3": EagleProposer(head("eagle3"), depth=3, nodes=12),
        "eagle3 adaptive": EagleProposer(head("eagle3", layers=2), depth=4),
        "jump": JumpProposer(head("jump"), depth=3, nodes=9),
        "peagle": PEagleProposer(head("peagle"), nodes=9),
        "dflash": DFlashProposer(head("dflash"), nodes=9),
        "flashmap": FlashMapProposer(head("flashmap"), nodes=9),
        "multi-token": MultiTokenProposer(head("multi-token"), nodes=9),
        "dflash adaptive": DFlashProposer(head("dflash")),
        "garbage": OnDevice(Adversary(1)),
        "wrong root": OnDevice(NGramProposer(length=1), spoil_root),
    }


def list_differences(accelerate: str, kinds: Sequence[str], names: Container[str] | None = None) -> Iterator[str]:
    """The cases whose text is not the CPU's. kinds: of models. names: of the proposers, None for all."""
    for kind, settings in product(kinds, SAMPLINGS):
        target, cpu = make_target(kind, cuda=True, accelerate=accelerate), make_target(kind, cuda=False)
        sampling = Sampling(**settings)
        expected = decode(cpu, None, sampling)
        for name, proposer in {"plain": None, **make_proposers(target)}.items():
            for batch_size in (1, 4) if names is None or name in names else ():
                if decode(target, proposer, sampling, batch_size) != expected:
                    yield f"{kind}, {name}, {settings}, batch {batch_size}"


def decode(
    target: Target, proposer: Proposer | None, sampling: Sampling, batch_size: int = 1, nodes: int = 64
) -> list[list[int]]:
    settings = {"sampling": sampling, "batch_size": batch_size, "nodes": nodes, **LIMITS}
    answers = generate(target, PROMPTS, proposer, **settings)
    return [answer.tokens for answer in answers]


def list_accepted_faults(accelerate: str) -> Iterator[str]:
    """Faulty trees that raise another error than on a CPU, or none."""
    target = make_target("llama", cuda=True, accelerate=accelerate)
    for message, spoil in SPOILT.items():
        try:
            generate(target, PROMPTS, OnDevice(NGramProposer(length=4), spoil), **LIMITS)
        except ValueError as error:
            if message not in str(error):
                yield f"{message}: {error}"
        else:
            yield f"{message}: no error"


def list_recaptured() -> Iterator[str]:
    """Proposers for which a third run captures graphs that the second one had."""
    target, captured = make_target("llama", cuda=True, accelerate="graphs"), list[int]()
    capture = graph.CudaGraphPool.capture

    def count(*args: Any) -> Any:  # a mock would keep the sessions alive
        captured.append(len(captured))
        return capture(*args)

    for name, proposer in {"plain": None, **make_proposers(target)}.items():
        if name in REUSING:
            captured.clear()
            with patch.object(graph.CudaGraphPool, "capture", count):
                for _ in range(2):
                    decode(target, proposer, Sampling())
                before = len(captured)
                decode(target, proposer, Sampling())
            if not before or len(captured) > before:
                yield f"{name}: {before} graphs, then {len(captured)}"
    drafter = EagleProposer(to_cuda(make_head("eagle3", target)), depth=3, nodes=12).prepare(target)
    captured.clear()
    with patch.object(graph.CudaGraphPool, "capture", count):
        texts, counts = [], []
        for _ in range(4):
            texts.append(decode(target, drafter.renew(), Sampling()))
            counts.append(len(captured))
    if counts[-1] > counts[-2] or counts[0] == 0 or any(text != texts[0] for text in texts):
        yield f"renewed drafters: {counts} graphs"


def list_joined_faults(accelerate: str) -> Iterator[str]:
    """Requests that begin together. They sample in two ways, and one ends with its first token."""
    target, cpu = make_target("llama", cuda=True, accelerate=accelerate), make_target("llama", cuda=False)
    engine, requests = Engine(target, NGramProposer(length=3), rows=4), list[Request]()
    for prompt, temperature, count in zip(PROMPTS, (0.0, 0.8, 0.0, 0.8), (1, 6, 9, 6), strict=True):
        sampling = Sampling(temperature, seed=1)
        requests.append(engine.add(prompt, sampling=sampling, max_new_tokens=count, stop_ids=[]))
    list(engine)
    for request in requests:
        limits: dict[str, Any] = {"max_new_tokens": request.limits.max_new_tokens, "stop_ids": []}
        alone = generate(
            cpu, [request.prompt], None, request_ids=[request.request_id], sampling=request.sampling, **limits
        )
        if request.sequence != [*request.prompt, *alone[0].tokens]:
            yield f"request {request.request_id} of several that begin together"


def drafts_follow_weights() -> bool:
    """Whether a head drafts by the output matrix that it borrows, after that has changed."""
    target, found = make_target("llama", cuda=True, accelerate="graphs"), []
    head = to_cuda(make_head("medusa", target, output="target", draft_size=32))
    kept = MedusaProposer(head, nodes=9)
    for change in (False, True):
        if change:
            with torch.no_grad():
                weight = target.model.get_output_embeddings().weight
                weight.copy_(weight.flip(0))
            target.weights_changed()
        for proposer in (kept, MedusaProposer(head, nodes=9)):
            recorder = Recorder(proposer)
            generate(target, PROMPTS[:1], recorder, max_new_tokens=20, stop_ids=[])
            found.append(recorder.drafted)
    return found[0] == found[1] and found[2] == found[3] and found[1] != found[3]


def wait(*_: Any) -> None:
    torch.ones(1, device="cuda").tolist()


def list_graph_faults(notices: Sequence[str]) -> Iterator[str]:
    """Where graphs give other texts than steps that are none, or a step is a graph that cannot be one."""
    target, other = (make_target("llama", cuda=True, accelerate=mode) for mode in ("graphs", "off"))
    for settings, batch_size in product(SAMPLINGS, (1, 4)):  # sampled drafts differ between devices and batches
        drafters = [(each, DraftProposer(each, depth=3, sampled=True, nodes=4)) for each in (target, other)]
        texts = [decode(*drafter, Sampling(**settings), batch_size) for drafter in drafters]
        if texts[0] != texts[1]:
            yield f"draft sampled, {settings}, batch {batch_size}"
    processed = Sampling(processors=[RepetitionPenaltyLogitsProcessor(1.5)])
    if decode(target, NGramProposer(length=4), processed) != decode(other, None, processed):
        yield "logits processors"
    processed = replace(processed, temperature=0.8, seed=3)
    if decode(target, PaddedTrees(), processed, nodes=3) != decode(other, None, processed):
        yield "trees that are padded beyond the budget"
    if notices:
        yield f"a graph could not be captured: {notices}"
    if not drafts_follow_weights():
        yield "drafts by the output matrix of earlier weights"
    with target.model.register_forward_pre_hook(wait):
        if decode(target, None, Sampling()) != decode(other, None, Sampling()):
            yield "a model that waits for the device"
        if Target(target.model, accelerate="auto").has_graphs:
            yield "a wait was captured"
        try:
            yield f"graphs of a wait: {Target(target.model, accelerate='graphs')}"
        except ValueError as error:
            if "cannot have CUDA graphs" not in str(error):
                yield f"graphs of a wait: {error}"
    if len(notices) < 3:
        yield f"no notice: {notices}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--graphs", action="store_true", help="steps are graphs; fewer proposers")
    parser.add_argument("--model", choices=MODELS, help="compare texts of this one only")
    options = parser.parse_args()
    kinds = [options.model] if options.model else MODELS
    torch.set_num_threads(1)
    notices: list[str] = []
    with simulate(), recorded_graphs(), patch.object(graph, "print_notice", notices.append):
        if options.graphs:
            faults = [
                *list_differences("graphs", kinds, GRAPH_CASES),
                *list_accepted_faults("graphs"),
                *list_joined_faults("graphs"),
                *list_recaptured(),
            ]
            faults += list_graph_faults(notices)
        else:
            faults = [*list_differences("off", kinds), *list_accepted_faults("off"), *list_joined_faults("off")]
        print(json.dumps(faults))


if __name__ == "__main__":
    main()
