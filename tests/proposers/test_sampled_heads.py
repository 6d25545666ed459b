"""Sampled drafts of heads: every draft and every acceptance of small cases, with exact probabilities.

The conditions for a draft's tree are in `proposers.trees.sampled`. The wrong variants at the end break one each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TopKLogitsWarper

from decode import Sampling, Step, Target, Tree, generate
from decode.models.cost_curve import CostCurve
from decode.rejection import SampledTree
from proposers import HEAD_PROPOSERS, draft_budget
from proposers.draft_budget import DraftBudget
from proposers.trees import sampled, search
from tests.support.drafting import fix_cost, make_head
from tests.support.enumeration import EXACT, WRONG, Enumerator, Prefix, count_tokens, enumerate_outcomes, measure_error
from tests.support.models import tiny
from tests.support.reference_rules import RULES, RowRule

VOCABULARY = 4
TEXT = [3, 1, 2, 1]
EAGLES = ["eagle", "eagle3"]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"depth": 3, "width": 1, "nodes": 4},
    "dynamic": {"depth": 2, "width": 2, "nodes": 5},
    "dynamic, many nodes": {"depth": 2, "width": 2, "nodes": 6},  # two paths with children
    "dynamic, few nodes": {"depth": 2, "width": 2, "nodes": 3},
    "adaptive": {"depth": 2, "width": 2},
    "adaptive, chain": {"depth": 3, "width": 1},
}


def make_small(kind: str, shape: str, target: Target) -> Any:
    """With so few draft tokens that all drafts can be enumerated."""
    settings = dict(SHAPES[shape])
    if kind in EAGLES:
        return make(kind, target, {"draft_size": 3}, **settings)
    depth, width = settings.pop("depth"), settings.pop("width", None)
    proposer = make(kind, target, {"draft_size": 3, "heads": depth}, **settings)
    proposer.width = proposer.ranks = width or proposer.ranks
    return proposer


def make(kind: str, target: Target, head: dict[str, Any] | None = None, **settings: Any) -> Any:
    return HEAD_PROPOSERS[kind](make_head(kind, target, **(head or {})), **{"sampled": True, **settings})


# ---- every draft of one step, every acceptance of it ----


class First:
    """Keeps the first step for later."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = layers

    def propose(self, step: Step, budget: int) -> Tree:
        self.step = replace(step, sequences=[list(sequence) for sequence in step.sequences], room=[100])
        return Tree.chain([[root] for root in step.bonus])


class TargetProbabilities:
    """The target's probabilities after a text, in the form that `measure_error` reads."""

    def __init__(self, target: Target, text: Sequence[int], sampling: Sampling) -> None:
        self.target, self.text, self.sampling, self.vocabulary = target, text, sampling, target.vocabulary
        self.cache: dict[Prefix, Tensor] = {}

    def p(self, prefix: Prefix) -> Tensor:
        if prefix not in self.cache:
            text = [*self.text, *prefix]
            logits, _ = self.target.open(1).extend([text])
            self.cache[prefix] = self.sampling.probabilities(logits, [torch.tensor(text)], [0])[0]
        return self.cache[prefix]


def draw_all(monkeypatch: pytest.MonkeyPatch, dice: Enumerator) -> None:
    """Let the enumerator choose the tokens."""

    def draw(qs: Tensor, uniforms: Tensor) -> Tensor:
        drawn = []
        for q in qs.clone():
            for _ in range(uniforms.shape[1]):
                drawn.append(dice.draw(q) if q.sum() > 0 else 0)
                q[drawn[-1]] = 0
        return torch.tensor(drawn).view(uniforms.shape[:2])

    monkeypatch.setattr(sampled, "sample_without_replacement", draw)


def emit(
    monkeypatch: pytest.MonkeyPatch, propose: Callable[[], Tree], targets: TargetProbabilities, rule: RowRule
) -> dict:
    """The distribution of the tokens that one step emits: accepted tokens and the bonus token."""

    def draft(dice: Any) -> Tree:
        draw_all(monkeypatch, dice)
        return propose()

    trees: dict[Any, tuple[Tree, float]] = {}  # many drafts differ only in what was not kept
    for tree, probability in enumerate_outcomes(draft):
        key = tuple(tree.tokens[0].tolist()), tuple(tree.parents[0].tolist())
        trees[key] = tree, probability + (trees[key][1] if key in trees else 0.0)
    distribution: dict[Prefix, float] = {}
    for (tokens, parents), (tree, drafted_with) in trees.items():
        prefixes: list[Prefix] = [()]
        for node in range(1, len(tokens)):
            prefixes.append((*prefixes[parents[node]], tokens[node]))
        p = [targets.p(prefix) for prefix in prefixes]
        q = tree.q
        drafted = SampledTree(
            tokens, parents, [True] * len(tokens), p.__getitem__, lambda node, q=q: q[0, node].clone()
        )
        for (path, bonus), probability in enumerate_outcomes(partial(rule, drafted)):
            emitted = (*prefixes[path[-1]], bonus)
            distribution[emitted] = distribution.get(emitted, 0.0) + drafted_with * probability
    return distribution


def emit_with(
    monkeypatch: pytest.MonkeyPatch,
    proposer: Any,
    target: Target,
    sampling: Sampling,
    rule: RowRule,
    times: Sequence[float],
) -> Any:
    """That distribution for a proposer's first draft, and the target's. times: of passes over 1, 2 and 8 nodes."""
    fix_cost(monkeypatch, target, CostCurve([1, 2, 8], times))
    monkeypatch.setattr(DraftBudget, "is_worth_a_level", lambda self, p: p > 0.5)
    first = First(proposer.layers)
    generate(target, [TEXT], first, sampling=sampling, max_new_tokens=2)

    targets = TargetProbabilities(target, first.step.sequences[0], sampling)
    return emit(monkeypatch, lambda: proposer.renew().propose(first.step, 64), targets, rule), targets


@pytest.fixture(scope="module")
def tiny_target() -> Target:
    return Target(tiny("llama", vocab_size=VOCABULARY))


PLAIN = Sampling(temperature=2.0, seed=2)  # the errors below show after the first token
CUT = Sampling(temperature=3.0, top_k=3, top_p=0.95)  # the head is cut like the target, by its own top tokens
TARGET_CUT = Sampling(temperature=2.0, processors=[TopKLogitsWarper(2)])  # processors do not apply to the head
STEPS = (1.0, 2.0, 2.0)  # more than two nodes cost nothing, so the size depends on the tokens
CASES = [
    ("eagle", "chain", "block", CUT),
    ("eagle", "dynamic, few nodes", "traversal", PLAIN),
    ("eagle", "dynamic, many nodes", "traversal", CUT),
    ("eagle", "adaptive", "traversal", PLAIN),
    ("eagle3", "chain", "traversal", TARGET_CUT),
    ("eagle3", "adaptive", "rrsw", CUT),
    ("eagle3", "dynamic", "traversal", CUT),
    ("eagle3", "dynamic, few nodes", "traversal", TARGET_CUT),
    ("hydra", "dynamic, many nodes", "rrsw", PLAIN),
    ("hydra", "adaptive", "traversal", TARGET_CUT),
    ("eagle", "adaptive, chain", "block", PLAIN),
    ("medusa", "dynamic, few nodes", "traversal", PLAIN),
]


@pytest.mark.parametrize(
    ("kind", "shape", "rule", "sampling", "times"),
    [*((*case, (1.0, 1.05, 2.1)) for case in CASES), ("eagle", "adaptive, chain", "traversal", PLAIN, STEPS)],
)
def test_one_step_keeps_the_targets_distribution(
    monkeypatch: pytest.MonkeyPatch,
    tiny_target: Target,
    kind: str,
    shape: str,
    rule: str,
    sampling: Sampling,
    times: Sequence[float],
) -> None:
    proposer = make_small(kind, shape, tiny_target)
    distribution, targets = emit_with(monkeypatch, proposer, tiny_target, sampling, RULES[rule], times)
    assert count_tokens(distribution) > 1.05
    assert measure_error(distribution, targets) < EXACT


# ---- errors that these tests must find ----


def choose_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: nodes are chosen by the probabilities of the sampled tokens."""
    pick = sampled.SampledTokens.pick

    def peek(self: Any, logits: Tensor, ranks: int, places: Tensor) -> tuple[Tensor, Tensor]:
        drawn, _ = pick(self, logits, ranks, places)
        return drawn, self._samples[-1][1].gather(2, drawn).log().clamp(min=-80).float()

    monkeypatch.setattr(sampled.SampledTokens, "pick", peek)
    monkeypatch.setattr(search, "keep_order", lambda log_p: log_p)


def size_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: the number of nodes is chosen after all are sampled."""
    monkeypatch.setattr(draft_budget, "grow_while_worth", draft_budget.choose_fastest)


def share_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: the same tokens after each path."""
    pick = sampled.SampledTokens.pick

    def copy(self: Any, logits: Tensor, ranks: int, places: Tensor) -> tuple[Tensor, Tensor]:
        drawn, sure = pick(self, logits, ranks, places[:, :1])
        self._samples[-1] = places, self._samples[-1][1].expand(-1, places.shape[1], -1)
        return drawn.expand(-1, places.shape[1], -1), sure

    monkeypatch.setattr(sampled.SampledTokens, "pick", copy)


WRONGS = [
    (choose_by_token, "hydra", "dynamic, few nodes"),
    (size_afterwards, "eagle", "adaptive, chain"),
    (share_samples, "medusa", "dynamic, many nodes"),
]


@pytest.mark.parametrize(("wrong", "kind", "shape"), WRONGS)
def test_wrong_drafts_are_caught(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, wrong: Any, kind: str, shape: str
) -> None:
    proposer = make_small(kind, shape, tiny_target)
    wrong(monkeypatch)
    distribution, targets = emit_with(monkeypatch, proposer, tiny_target, PLAIN, RULES["traversal"], STEPS)
    assert measure_error(distribution, targets) > WRONG
