"""Random heads for tiny targets, what a proposer drafts with them, and the tokens of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from decode import Proposer, Request, Step, Target, Tree, generate
from decode.devices.cost_curve import CostCurve
from decode.devices.transfer import Upload
from decode.requests.answer import Limits
from heads import KINDS, LayerConfig, choose_features
from heads.jump import choose_jump

LAYER = LayerConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=16)
SMALL_BLOCK: dict[str, Any] = {
    **{"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 1, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 16},
}
Paths = dict[tuple[int, ...], float]


def draw_head(
    kind: str, hidden_size: int, vocab_size: int, dtype: torch.dtype = torch.float64, seed: int = 0, **settings: Any
) -> Any:
    """A head with random weights and a random draft vocabulary; 3 of them where the kind has several."""
    network, config = KINDS[kind].network, KINDS[kind].config
    defaults: dict[str, Any] = {"heads": 3}
    if kind.startswith("eagle"):
        defaults = {"layer": replace(LAYER, input_norm=kind == "eagle3")}
    if kind == "peagle":
        defaults |= {"layer": LAYER, "mask_token": 3}
    if kind == "dflash":
        defaults |= {"layer": replace(LAYER, qk_norm=True), "pair_rank": 5, "mask_token": 3}
    if kind == "multi-token":
        defaults |= {"layer": LAYER}
    if kind == "flashmap":
        defaults |= {"layer": replace(LAYER, num_key_value_heads=4, qk_norm=True), "width": 32, "layers": 2}
    if kind == "jump":
        defaults = {"layer": LAYER, "features": (0, 1)}
    if kind == "mtp":
        defaults = {"block": SMALL_BLOCK | {"hidden_size": hidden_size}}
    head: Any = network(config(hidden_size, vocab_size, **{**defaults, **settings})).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
        parameter.data = noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + noise / 5
    if head.token_map is not None:
        head.token_map.copy_(torch.randperm(vocab_size, generator=generator)[: head.draft_size].sort().values)
    return head


def make_head(kind: str, target: Target, *, seed: int = 0, prefix: bool = False, **settings: Any) -> Any:
    """`draw_head` in the target's sizes and number format."""
    width, layers = target.config.hidden_size, target.config.num_hidden_layers
    defaults: dict[str, Any] = {"target_layers": layers}
    if kind in ("eagle3", "peagle", "dflash", "flashmap"):
        defaults["features"] = choose_features(layers)
    if kind == "jump":
        defaults["features"] = choose_jump(layers)
    if prefix:
        defaults["prefix"] = LAYER
    head = draw_head(kind, width, target.vocabulary, target.dtype, seed, **{**defaults, **settings})
    if head.output == "target":
        head.borrow(target.output_matrix, target.output_bias)
    if kind == "flashmap":
        head.draw(target.embedding_matrix.cpu())
    return head


def tree_of_rows(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tree:
    """`Tree.of_rows` with the exact height."""
    tree = Tree.of_rows(rows)
    return replace(tree, height=int(tree.depth.max()))


def tree_of_paths(roots: Sequence[int], paths: Sequence[Sequence[Sequence[int]]]) -> Tree:
    """Several token paths a row, each beginning after the root; shared beginnings become shared nodes."""
    rows = []
    for root, row_paths in zip(roots, paths, strict=True):
        starts = [tuple(path[:size]) for path in row_paths for size in range(1, len(path) + 1)]
        nodes = [*dict.fromkeys([(), *starts])]  # each as the path to it
        parents = [nodes.index(node[:-1]) for node in nodes[1:]]
        rows.append(([root, *(node[-1] for node in nodes[1:])], [-1, *parents]))
    return tree_of_rows(rows)


def list_paths(tree: Tree, row: int) -> Paths:
    """The token paths of a row's nodes, root excluded, with their scores."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, int(tree.sizes[row])):
        paths[node] = (*paths[int(tree.parents[row, node])], int(tree.tokens[row, node]))
    scores = torch.zeros(tree.tokens.shape) if tree.scores is None else tree.scores
    return {path: float(scores[row, node]) for node, path in paths.items() if node}


def fix_cost(monkeypatch: pytest.MonkeyPatch, target: Target, curve: CostCurve) -> None:
    """Give a target this cost curve for every batch size and context. Steps do not correct it."""
    monkeypatch.setattr(target.costs, "fixed", True)
    monkeypatch.setattr(target, "cost_curve", lambda *_: curve)


def first_step(target: Target, *sequences: Sequence[int], room: Sequence[int] = ()) -> Step:
    """The step after prompts were read; each sequence ends with its bonus token. room: of each row, 100 by default."""
    upload, requests = Upload(target.device), []
    for request_id, (*prompt, bonus) in enumerate(sequences):
        limits = Limits(1 + (room[request_id] if room else 100), frozenset([2]))
        requests.append(Request(request_id, prompt, limits, 1000))
        requests[-1].sequence.append(bonus)
    upload.add({"roots": torch.tensor([sequence[-1] for sequence in sequences])})
    count, prompts = len(requests), [request.prompt for request in requests]
    tree = Tree.chain([prompt[-1:] or [0] for prompt in prompts])
    return Step(target, requests, [None] * count, prompts, [[0]] * count, tree, torch.empty(0), upload=upload)


def texts(*given: Any, **settings: Any) -> list[list[int]]:
    """The tokens of each answer of `generate`."""
    return [answer.tokens for answer in generate(*given, **settings)]


class Known:
    """Drafts the known answers as trees, with a wrong token next to each right one. It is told them by request id."""

    layers: Sequence[int] = ()

    def __init__(self, answers: Mapping[int, Sequence[int]], depth: int = 6) -> None:
        self.answers, self.depth = answers, depth
        self.trees: list[Tree] = []  # as they were verified

    def propose(self, step: Step, budget: int) -> Tree:
        self.trees.append(step.tree)
        rows = []
        for request in step.requests:
            done = len(request.sequence) - len(request.prompt)
            right = self.answers[request.request_id][done : done + min(self.depth, (budget - 1) // 2)]
            tokens = [each for token in right for each in (token, (token + 1) % step.target.vocabulary)]
            parents = [max(0, 2 * (place // 2) - 1) for place in range(len(tokens))]
            rows.append(([request.sequence[-1], *tokens], [-1, *parents]))
        return tree_of_rows(rows)


class Recorder:
    """Records what a proposer drafts after each text."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self.layers = proposer, proposer.layers
        for name in ("begin", "fuse", "finish"):
            if getattr(proposer, name, None) is not None:
                setattr(self, name, getattr(proposer, name))
        self.trees: list[Tree] = []
        self.accepted: list[list[int]] = []  # draft tokens, of each row at each step
        self.drafted: dict[tuple[int, ...], Paths] = {}

    def propose(self, step: Step, budget: int) -> Tree:
        self.step = step
        self.accepted.append([len(path) - 1 for path in step.path])
        tree = self.proposer.propose(step, budget)
        self.trees.append(tree)
        for row, sequence in enumerate(step.sequences):
            self.drafted[tuple(sequence)] = list_paths(tree, row)
        return tree
