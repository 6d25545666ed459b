"""Random heads for tiny targets, and what a proposer drafts with them."""

from __future__ import annotations

from typing import Any

import torch

from decode import Proposer, Step, Target, Tree
from heads import HydraConfig, HydraHead, LayerConfig, MedusaConfig, MedusaHead

PREFIX = LayerConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=16)
Paths = dict[tuple[int, ...], float]


def make_head(kind: str, target: Target, *, seed: int = 0, prefix: bool = False, **settings: Any) -> Any:
    """A head of 3 with random weights, in the target's sizes and number format."""
    sizes = {"heads": 3, "target_layers": target.config.num_hidden_layers, **settings}
    width = target.config.hidden_size
    if kind == "medusa":
        head: Any = MedusaHead(MedusaConfig(width, target.vocabulary, **sizes))
    else:
        head = HydraHead(HydraConfig(width, target.vocabulary, prefix=PREFIX if prefix else None, **sizes))
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.to(target.dtype).parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        parameter.data = noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + noise / 5
    if head.token_map is not None:
        head.token_map.copy_(torch.randperm(target.vocabulary, generator=generator)[: head.draft_size].sort().values)
    if head.output == "target":
        head.borrow(target.output_matrix)
    return head


def list_paths(tree: Tree, row: int) -> Paths:
    """The token paths of a row's nodes, root excluded, with their scores."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, int(tree.sizes[row])):
        paths[node] = (*paths[int(tree.parents[row, node])], int(tree.tokens[row, node]))
    scores = torch.zeros(tree.tokens.shape) if tree.scores is None else tree.scores
    return {path: float(scores[row, node]) for node, path in paths.items() if node}


class Recorder:
    """Notes what a proposer drafts behind each text."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self.layers = proposer, proposer.layers
        self.trees: list[Tree] = []
        self.drafted: dict[tuple[int, ...], Paths] = {}

    def observe(self, step: Step) -> None:
        self.step = step
        self.proposer.observe(step)

    def propose(self, budget: int) -> Tree:
        tree = self.proposer.propose(budget)
        self.trees.append(tree)
        for row, sequence in enumerate(self.step.sequences):
            self.drafted[tuple(sequence)] = list_paths(tree, row)
        return tree
