"""Two paths as two rows next to one chain, for targets with a recurrent state: tau, and tokens per processor second.

    OMP_NUM_THREADS=1 python -m docs.measure.two_leaves spec_bench_dev.jsonl

Tau is that of `merged` on the default model, whose trees are cut down to one chain or two: the second one leaves the
first where that adds most, by the tree's probabilities. Times are those of recurrent models with random weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decode import Step, Target, Tree, stream
from decode.costs import fill, random_chain
from decode.recurrent import MOST_GIVEN
from docs.measure.recurrent import CONFIG
from draftless_commands.benchmark.files import find_commit
from proposers import MergedProposer
from proposers.sources.growing_tree import GrowingNode, GrowingTree

HIDDEN = {"hidden_size": 1024, "intermediate_size": 6656, "num_attention_heads": 16, "num_key_value_heads": 8}
LFM2 = HIDDEN | {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}  # 350M
MODELS: dict[str, dict[str, Any]] = {"qwen3_5_text": CONFIG, "lfm2": LFM2}
WIDTHS = 1, 2, 4, 8, 12, 16


class Chains(MergedProposer):
    """Drafts a chain or two, as a tree, of `nodes` nodes each. sizes: of each step, the nodes of each chain."""

    rows, sizes = 1, list[list[int]]()

    def propose(self, step: Step, budget: int) -> Tree:
        self._observe(step)
        tree = GrowingTree(step.requests[0], self.sources, self.counts, self._trusts, 0.0)
        self._trees = {step.request_ids[0]: tree}
        first = self._extend(tree, [tree.root])
        others = [self._extend(tree, first[:depth], first[depth]) for depth in range(1, len(first)) if self.rows > 1]
        second = max(others, key=lambda path: sum(node.p for node in {*path} - {*first}), default=first)
        tree.nodes = [*dict.fromkeys(first + second)]
        self.sizes.append([len(first), len(second)][: 1 + bool({*second} - {*first})])
        parents = [-1, *(tree.nodes.index(node.parent) for node in tree.nodes if node.parent)]
        return Tree.of_rows([([node.token for node in tree.nodes], parents)])

    def _extend(self, tree: GrowingTree, path: list[GrowingNode], but: GrowingNode | None = None) -> list[GrowingNode]:
        while len(path) < self.nodes and path[-1].depth < tree.deepest and path[-1].token not in tree.stop_ids:
            tree._ask(parent := path[-1])
            likely = [(each, token) for token, each in parent.likely.items() if not but or token != but.token]
            if not likely:
                break
            ((p, source), token), but = max(likely), None
            path.append(tree._make(parent, token))
            path[-1].p, path[-1].best = parent.p * p, source
        return path


def answer(target: Target, question: str, nodes: int, rows: int) -> list[Any]:
    proposer = Chains(nodes=nodes)
    proposer.rows, proposer.sizes = rows, []
    chunks = stream(target, [question], proposer, max_new_tokens=64)
    return [*zip(proposer.sizes, [len(chunk.tokens) for chunk in chunks][1:], strict=True)]


@torch.inference_mode()
def time_passes(target: Target) -> dict[int, list[float]]:
    """The shortest of 12 passes over one row, and over two whose states are copied before."""
    times = {(rows, width): list[float]() for rows in (1, 2) for width in WIDTHS}
    sessions = {rows: fill(target.open(rows), 256) for rows in (1, 2)}
    for (rows, width), found in [*times.items()] * 12:
        tree, session, begun = random_chain(width, rows, target), sessions[rows], process_time()
        for layer in session.states.layers if rows > 1 else ():
            layer.change(lambda state: state[[0, 0]])
        session.verify(tree)
        found.append(process_time() - begun)
        session.states.forget()
    return {rows: [min(times[rows, width]) for width in WIDTHS] for rows in (1, 2)}


def sum_up(answers: list[list[Any]], times: dict[int, list[float]]) -> np.ndarray:
    """The tokens and the seconds [2] of each answer. Passes begin with what the last one gave (`decode.recurrent`)."""
    sums = np.zeros((len(answers), 2))
    for steps, found in zip(answers, sums, strict=True):
        given = 0
        for sizes, accepted in steps:
            width = given + max(sizes)
            found += accepted, np.interp(width, WIDTHS, times[len(sizes)])
            given = (given + accepted) * (given + accepted < width)
            if given > MOST_GIVEN:  # they get a pass of their own
                found[1], given = found[1] + np.interp(given, WIDTHS, times[1]), 0
    return sums


def main() -> None:
    questions = [json.loads(line)["turns"][0] for line in Path(sys.argv[1]).read_text().splitlines()[::10]]
    times, target = {}, Target.load()
    for kind, config in MODELS.items():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).eval()
        times[kind] = time_passes(Target(model, accelerate="auto"))
    found = {"commit": find_commit(), "seconds": times}
    samples = np.random.default_rng(0).integers(len(questions), size=(1000, len(questions)))
    for nodes in 4, 8:
        answers = [[answer(target, question, nodes, rows) for question in questions] for rows in (1, 2)]
        taus = [float(np.mean([tokens for steps in each for _, tokens in steps])) for each in answers]
        found[f"{nodes} nodes"] = shown = {"tau": taus}
        for name, each in times.items():  # tokens per second of two chains relative to one, and an interval of 95 %
            one, two = (sum_up(part, each)[[range(len(questions)), *samples]].sum(axis=1) for part in answers)
            gains = two[:, 0] / two[:, 1] / (one[:, 0] / one[:, 1])
            shown[name] = [float(gains[0]), *np.percentile(gains[1:], (2.5, 97.5)).tolist()]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
