"""The acceptance rules, by exact enumeration: every draft, every outcome, its exact probability."""

import pytest
import torch
from torch import Tensor

from decode.rejection import Randomness, SampledTree, accept_by_traversal
from tests.support.enumeration import (
    EXACT,
    KINDS,
    WRONG,
    ChooseToken,
    Distributions,
    Prefix,
    Shape,
    count_tokens,
    draft_best,
    draft_other,
    draft_repeated,
    emit,
    make_shape,
    measure_error,
)
from tests.support.reference_rules import RULES, RowRule, block, rrsw, walk_row

ALL: dict[str, RowRule] = {"walk": walk_row, **RULES}
CHAIN = make_shape("s", "s", "s")
SHAPES: dict[str, Shape] = {
    "root only": [],
    "chain": CHAIN,
    "2,2": make_shape("ss", "ss"),
    "3,1": make_shape("sss", "s"),
    "depth first": [(0, True), (1, True), (2, True), (1, True), (0, True), (5, True)],
    "1+1": make_shape("sd", "sd"),
    "1+1, deterministic first": make_shape("ds", "ds"),
    "2+1": make_shape("ssd", "s"),
    "1+2": make_shape("sdd", "s"),
    "fixed": make_shape("dd", "d", "d"),
    "fixed above": make_shape("dd", "ss"),
}
SAMPLED = {name: shape for name, shape in SHAPES.items() if shape and all(sampled for _, sampled in shape)}
MIXED = {name: shape for name, shape in SHAPES.items() if shape and name not in SAMPLED}


CASES = [(rule, shape) for rule in ALL for shape in SHAPES if rule != "block" or shape in ("root only", "chain")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_emitted_text_has_the_targets_distribution(rule: str, shape: str, kind: str) -> None:
    models = Distributions(kind)
    assert measure_error(emit(ALL[rule], models, SHAPES[shape]), models) < EXACT


@pytest.mark.parametrize("choose", [draft_repeated, draft_other])
@pytest.mark.parametrize("shape", MIXED)
@pytest.mark.parametrize("rule", ["walk", "traversal", "rrsw"])
def test_deterministic_tokens_may_repeat_or_avoid_their_siblings(rule: str, shape: str, choose: ChooseToken) -> None:
    for kind in ("generic", "zeros in p", "point q"):
        models = Distributions(kind, seed=1)
        assert measure_error(emit(ALL[rule], models, MIXED[shape], choose), models) < EXACT


@pytest.mark.parametrize("rule", ["traversal", "rrsw"])
def test_a_larger_vocabulary_and_other_seeds(rule: str) -> None:
    for seed in range(4):
        models = Distributions(KINDS[seed % 2], vocabulary=4, seed=seed)
        assert measure_error(emit(ALL[rule], models, make_shape("ssd", "s") if seed % 2 else CHAIN), models) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_traversal_of_a_chain_is_block_verification(kind: str) -> None:
    models = Distributions(kind, vocabulary=4)
    ours, theirs = emit(accept_by_traversal, models, CHAIN), emit(block, models, CHAIN)
    assert max(abs(ours.get(text, 0.0) - theirs.get(text, 0.0)) for text in {*ours, *theirs}) < EXACT
    assert count_tokens(theirs) >= count_tokens(emit(rrsw, models, CHAIN)) - EXACT


@pytest.mark.parametrize("shape", SHAPES)
def test_traversal_emits_at_least_as_much_as_rrsw(shape: str) -> None:
    gains = []
    for seed, kind in enumerate(("generic", "zeros in q", "generic")):
        models = Distributions(kind, seed=seed)
        lengths = [count_tokens(emit(rule, models, SHAPES[shape])) for rule in (accept_by_traversal, rrsw)]
        gains.append(lengths[0] - lengths[1])
    assert min(gains) > -EXACT
    assert max(gains) > WRONG or shape in ("root only", "fixed")


def test_every_rule_is_the_walk_for_deterministic_trees() -> None:
    models = Distributions("generic", vocabulary=4)
    emitted = [emit(ALL[rule], models, SHAPES["fixed"], draft_other) for rule in ("walk", "traversal", "rrsw")]
    for other in emitted[1:]:
        assert other.keys() == emitted[0].keys()
        assert max(abs(other[text] - emitted[0][text]) for text in other) < EXACT


def test_a_mixed_node_reaches_the_optimum() -> None:
    """Hu et al., ICLR 2025: p(S) + sum min(p, q) off S; the other order gives p(S) + sum min(p, (1 - p(S)) q)."""
    sampled_first, deterministic_first = [], []
    for seed in range(40):
        models = Distributions("generic", vocabulary=4, seed=seed)
        best, p, q = draft_best(models, (), []), models.p(()), models.q(()).clone()
        q[best] = 0
        models.cache["q", ()] = q = q / q.sum()
        sampled_first.append(float(p[best] + torch.minimum(p, q).sum()))
        deterministic_first.append(float(p[best] + torch.minimum(p, (1 - p[best]) * q).sum()))
        for rule in (accept_by_traversal, rrsw):
            assert abs(count_tokens(emit(rule, models, make_shape("ds"))) - 1 - sampled_first[-1]) < EXACT
    assert sum(sampled_first) > sum(deterministic_first) + 40 * 0.03


# --- mistakes that these tests must catch ----------------------------------------------------------------------------


def draft_argmax(models: Distributions, prefix: Prefix, siblings: list[int]) -> int:
    return int(models.q(prefix).argmax())


def call_sampled(rule: RowRule) -> RowRule:
    """Wrong: treat deterministic tokens as if they were sampled from q."""
    return lambda tree, randomness: rule(
        SampledTree(tree.tokens, tree.parents, [True] * len(tree.tokens), tree.p, tree.q), randomness
    )


def reject_with_stale_q(tree: SampledTree, randomness: Randomness) -> tuple[list[int], int]:
    """Wrong: rejection sampling that tests every sibling as if it were sampled first."""
    path = [0]
    while True:
        p, q = tree.p(path[-1]), tree.q(path[-1])
        for child in (i for i, parent in enumerate(tree.parents) if parent == path[-1]):
            token = tree.tokens[child]
            if randomness.accept(min(1.0, float(p[token] / q[token]))):
                path.append(child)
                break
            p = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
        else:
            return path, randomness.draw(p)


def test_wrong_rules_are_caught() -> None:
    models = Distributions("generic", seed=2)
    for rule in RULES.values():
        assert measure_error(emit(call_sampled(rule), models, make_shape("d", "d", "d"), draft_argmax), models) > WRONG
    assert measure_error(emit(reject_with_stale_q, models, SHAPES["2,2"]), models) > WRONG


def drop_by_token(rule: RowRule) -> RowRule:
    """Wrong: the last node is left out if its token is 0."""

    def judge(tree: SampledTree, randomness: Randomness) -> tuple[list[int], int]:
        size = len(tree.tokens) - (tree.tokens[-1] == 0)
        tokens, parents, sampled = tree.tokens[:size], tree.parents[:size], tree.sampled[:size]
        return rule(SampledTree(tokens, parents, sampled, tree.p, tree.q), randomness)

    return judge


def test_trees_may_grow_because_of_tokens_but_not_drop_a_node_because_of_its_own() -> None:
    def grows(node: int, drawn: dict[int, int]) -> bool:  # depends on all tokens so far, in any branch
        return node < 2 or hash((policy, node, *sorted(drawn.items()))) % 4 > 0

    grown = [(0, True), (1, True), (0, True), (1, True), (3, True), (0, False), (2, False), (6, True)]
    for policy in range(3):
        models = Distributions("generic", seed=policy)
        for rule in (accept_by_traversal, rrsw):
            assert measure_error(emit(rule, models, grown, exists=grows), models) < EXACT
            assert measure_error(emit(drop_by_token(rule), models, CHAIN), models) > WRONG


def test_sampled_siblings_must_not_depend_on_nodes_below_a_deterministic_one() -> None:
    late: Shape = [(0, False), (1, True), (0, True)]
    early: Shape = [(0, False), (0, True), (1, True)]
    models = Distributions("generic", seed=2)

    def grows(node: int, drawn: dict[int, int]) -> bool:
        return node < 3 or drawn[2] == 0

    for rule in (accept_by_traversal, rrsw):
        assert measure_error(emit(rule, models, late, exists=grows), models) > WRONG
        assert measure_error(emit(rule, models, early, exists=grows), models) < EXACT


# --- use --------------------------------------------------------------------------------------------------------------


class Seeded:
    """Randomness from a generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def accept(self, probability: float) -> bool:
        assert 0 <= probability <= 1
        return float(torch.rand((), generator=self.generator, dtype=torch.float64)) < probability

    def draw(self, weights: Tensor) -> int:
        assert weights.isfinite().all() and weights.sum() > 0
        return int(torch.multinomial(weights, 1, generator=self.generator))


def test_invalid_drafts_neither_crash_nor_emit_impossible_tokens() -> None:
    """Random trees with repeated tokens, tokens outside the support of q, and zeros in p and q."""
    for seed in range(150):
        generator = torch.Generator().manual_seed(seed)
        size, models = 1 + seed % 9, Distributions(KINDS[seed % len(KINDS)], vocabulary=5, seed=seed)
        p, q = (lambda node, model=model: model((node,)) for model in (models.p, models.q))
        tokens = torch.randint(5, (size,), generator=generator).tolist()
        sampled = (torch.rand(size, generator=generator) < 0.6).tolist()
        parents = [-1] + [int(torch.randint(i, (), generator=generator)) for i in range(1, size)]
        tree = SampledTree(tokens, parents, sampled, p, q)
        for rule in (accept_by_traversal, rrsw):
            path, bonus = rule(tree, Seeded(seed))
            for node, token in zip(path, [*(tokens[i] for i in path[1:]), bonus], strict=True):
                assert p(node)[token] > 0
