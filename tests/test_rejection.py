"""The acceptance rules, by exact enumeration: every draft, every outcome, its exact probability."""

import pytest
import torch
from torch import Tensor

from decode.rejection import RULES, Dice, Drafted, Rule, block, block_batch, rrsw, sample_siblings, traversal
from tests.enumeration import (
    EXACT,
    KINDS,
    WRONG,
    Guess,
    Laws,
    Prefix,
    Shape,
    count_tokens,
    emit,
    guess_again,
    guess_best,
    guess_other,
    make_shape,
    measure_error,
)


def walk_row(drafted: Drafted, dice: Dice) -> tuple[list[int], int]:
    """The deterministic rule for one row: draw the target's token, descend while it is a child."""
    path = [0]
    while True:
        token = dice.draw(drafted.p(path[-1]))
        children = [i for i, parent in enumerate(drafted.parents) if parent == path[-1] and drafted.tokens[i] == token]
        if not children:
            return path, token
        path.append(children[0])


ALL: dict[str, Rule] = {"walk": walk_row, **RULES}
CHAIN = make_shape("s", "s", "s")
SHAPES: dict[str, Shape] = {
    "root only": [],
    "chain": CHAIN,
    "2,2": make_shape("ss", "ss"),
    "3,1": make_shape("sss", "s"),
    "depth first": [(0, True), (1, True), (2, True), (1, True), (0, True), (5, True)],
    "1+1": make_shape("sd", "sd"),
    "1+1, guess first": make_shape("ds", "ds"),
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
def test_emitted_text_has_the_law_of_the_target(rule: str, shape: str, kind: str) -> None:
    laws = Laws(kind)
    assert measure_error(emit(ALL[rule], laws, SHAPES[shape]), laws) < EXACT


@pytest.mark.parametrize("guess", [guess_again, guess_other])
@pytest.mark.parametrize("shape", MIXED)
@pytest.mark.parametrize("rule", ["walk", "traversal", "rrsw"])
def test_guesses_may_repeat_or_avoid_their_siblings(rule: str, shape: str, guess: Guess) -> None:
    for kind in ("generic", "zeros in p", "point q"):
        laws = Laws(kind, seed=1)
        assert measure_error(emit(ALL[rule], laws, MIXED[shape], guess), laws) < EXACT


@pytest.mark.parametrize("rule", ["traversal", "rrsw"])
def test_a_larger_vocabulary_and_other_seeds(rule: str) -> None:
    for seed in range(4):
        laws = Laws(KINDS[seed % 2], vocabulary=4, seed=seed)
        assert measure_error(emit(ALL[rule], laws, make_shape("ssd", "s") if seed % 2 else CHAIN), laws) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_chain_traversal_is_block_verification(kind: str) -> None:
    laws = Laws(kind, vocabulary=4)
    ours, theirs = emit(traversal, laws, CHAIN), emit(block, laws, CHAIN)
    assert max(abs(ours.get(text, 0.0) - theirs.get(text, 0.0)) for text in {*ours, *theirs}) < EXACT
    assert count_tokens(theirs) >= count_tokens(emit(rrsw, laws, CHAIN)) - EXACT


@pytest.mark.parametrize("shape", SHAPES)
def test_traversal_emits_no_less_than_rrsw(shape: str) -> None:
    gains = []
    for seed, kind in enumerate(("generic", "zeros in q", "generic")):
        laws = Laws(kind, seed=seed)
        lengths = [count_tokens(emit(rule, laws, SHAPES[shape])) for rule in (traversal, rrsw)]
        gains.append(lengths[0] - lengths[1])
    assert min(gains) > -EXACT
    assert max(gains) > WRONG or shape in ("root only", "fixed")


def test_on_guesses_alone_every_rule_is_the_walk() -> None:
    laws = Laws("generic", vocabulary=4)
    laws_of = [emit(ALL[rule], laws, SHAPES["fixed"], guess_other) for rule in ("walk", "traversal", "rrsw")]
    for law in laws_of[1:]:
        assert law.keys() == laws_of[0].keys()
        assert max(abs(law[text] - laws_of[0][text]) for text in law) < EXACT


def test_a_mixed_node_reaches_the_optimum() -> None:
    """Hu et al., ICLR 2025: p(S) + sum min(p, q) off S; guesses first would give p(S) + sum min(p, (1 - p(S)) q)."""
    sampled_first, guesses_first = [], []
    for seed in range(40):
        laws = Laws("generic", vocabulary=4, seed=seed)
        best, p, q = guess_best(laws, (), []), laws.p(()), laws.q(()).clone()
        q[best] = 0
        laws.cache["q", ()] = q = q / q.sum()
        sampled_first.append(float(p[best] + torch.minimum(p, q).sum()))
        guesses_first.append(float(p[best] + torch.minimum(p, (1 - p[best]) * q).sum()))
        for rule in (traversal, rrsw):
            assert abs(count_tokens(emit(rule, laws, make_shape("ds"))) - 1 - sampled_first[-1]) < EXACT
    assert sum(sampled_first) > sum(guesses_first) + 40 * 0.03


# --- what the harness must catch --------------------------------------------------------------------------------------


def draft_argmax(laws: Laws, prefix: Prefix, siblings: list[int]) -> int:
    return int(laws.q(prefix).argmax())


def call_sampled(rule: Rule) -> Rule:
    """Wrong: verify guesses as if they were draws from q."""
    return lambda drafted, dice: rule(
        Drafted(drafted.tokens, drafted.parents, [True] * len(drafted.tokens), drafted.p, drafted.q), dice
    )


def reject_with_stale_q(drafted: Drafted, dice: Dice) -> tuple[list[int], int]:
    """Wrong: rejection sampling that offers every sibling as if it were the first draw."""
    path = [0]
    while True:
        p, q = drafted.p(path[-1]), drafted.q(path[-1])
        for child in (i for i, parent in enumerate(drafted.parents) if parent == path[-1]):
            token = drafted.tokens[child]
            if dice.accept(min(1.0, float(p[token] / q[token]))):
                path.append(child)
                break
            p = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
        else:
            return path, dice.draw(p)


def test_wrong_rules_are_caught() -> None:
    laws = Laws("generic", seed=2)
    for rule in RULES.values():
        assert measure_error(emit(call_sampled(rule), laws, make_shape("d", "d", "d"), draft_argmax), laws) > WRONG
    assert measure_error(emit(reject_with_stale_q, laws, SHAPES["2,2"]), laws) > WRONG


def drop_by_token(rule: Rule) -> Rule:
    """Wrong: the last node drafted is left out when it drew token 0."""

    def judge(drafted: Drafted, dice: Dice) -> tuple[list[int], int]:
        size = len(drafted.tokens) - (drafted.tokens[-1] == 0)
        tokens, parents, sampled = drafted.tokens[:size], drafted.parents[:size], drafted.sampled[:size]
        return rule(Drafted(tokens, parents, sampled, drafted.p, drafted.q), dice)

    return judge


def test_trees_may_grow_by_what_was_drawn_but_not_drop_it() -> None:
    def grows(node: int, drawn: dict[int, int]) -> bool:  # by all that was drawn, in any branch
        return node < 2 or hash((policy, node, *sorted(drawn.items()))) % 4 > 0

    grown = [(0, True), (1, True), (0, True), (1, True), (3, True), (0, False), (2, False), (6, True)]
    for policy in range(3):
        laws = Laws("generic", seed=policy)
        for rule in (traversal, rrsw):
            assert measure_error(emit(rule, laws, grown, exists=grows), laws) < EXACT
            assert measure_error(emit(drop_by_token(rule), laws, CHAIN), laws) > WRONG


def test_sampled_siblings_must_not_hang_on_what_grew_below_a_guess() -> None:
    late: Shape = [(0, False), (1, True), (0, True)]
    early: Shape = [(0, False), (0, True), (1, True)]
    laws = Laws("generic", seed=2)

    def grows(node: int, drawn: dict[int, int]) -> bool:
        return node < 3 or drawn[2] == 0

    for rule in (traversal, rrsw):
        assert measure_error(emit(rule, laws, late, exists=grows), laws) > WRONG
        assert measure_error(emit(rule, laws, early, exists=grows), laws) < EXACT


# --- use --------------------------------------------------------------------------------------------------------------


class Seeded:
    """Ordinary dice."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def accept(self, probability: float) -> bool:
        assert 0 <= probability <= 1
        return float(torch.rand((), generator=self.generator, dtype=torch.float64)) < probability

    def draw(self, weights: Tensor) -> int:
        assert weights.isfinite().all() and weights.sum() > 0
        return int(torch.multinomial(weights, 1, generator=self.generator))


def test_careless_trees_neither_crash_nor_leave_the_target() -> None:
    """Random trees with repeated tokens everywhere, draws that q cannot give, zeros in both laws."""
    for seed in range(150):
        generator = torch.Generator().manual_seed(seed)
        size, laws = 1 + seed % 9, Laws(KINDS[seed % len(KINDS)], vocabulary=5, seed=seed)
        p, q = (lambda node, law=law: law((node,)) for law in (laws.p, laws.q))
        tokens = torch.randint(5, (size,), generator=generator).tolist()
        sampled = (torch.rand(size, generator=generator) < 0.6).tolist()
        parents = [-1] + [int(torch.randint(i, (), generator=generator)) for i in range(1, size)]
        drafted = Drafted(tokens, parents, sampled, p, q)
        for rule in (traversal, rrsw):
            path, bonus = rule(drafted, Seeded(seed))
            for node, token in zip(path, [*(tokens[i] for i in path[1:]), bonus], strict=True):
                assert p(node)[token] > 0


def test_block_refuses_what_is_no_chain() -> None:
    for shape in (make_shape("ss"), make_shape("s", "d")):
        with pytest.raises(ValueError, match="single chain"):
            emit(block, Laws("generic"), shape)


class Recorded:
    """Dice that compare with given uniforms, the last node's first, and keep the weights of the draw."""

    def __init__(self, uniforms: list[float]) -> None:
        self.uniforms = uniforms

    def accept(self, probability: float) -> bool:
        return self.uniforms.pop() < probability

    def draw(self, weights: Tensor) -> int:
        self.weights = weights / weights.sum()
        return 0


def test_block_batch_agrees_with_block_on_ragged_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, width, vocabulary = 200, 6, 5
    sizes = 1 + torch.arange(rows) % width
    laws = torch.rand(2, rows, width, vocabulary, generator=generator, dtype=torch.float64) ** 3
    laws *= torch.rand(laws.shape, generator=generator) < 0.8  # zeros
    laws[..., 0] += 0.01
    laws[1] += 2 * laws[0]
    laws[1, ::5] = laws[0, ::5]  # p = q
    p, q = laws / laws.sum(dim=3, keepdim=True)
    tokens = torch.multinomial(q.flatten(0, 1).roll(1, 0), 1, generator=generator).view(rows, width)
    uniforms = torch.rand(rows, width + 1, generator=generator, dtype=torch.float64)
    expected = []
    for b, size in enumerate(sizes.tolist()):
        row, parents = tokens[b, :size].tolist(), range(-1, size - 1)
        chain = Drafted(row, parents, [True] * size, p[b].__getitem__, q[b].__getitem__)
        dice = Recorded(uniforms[b, :size].tolist())
        expected.append((len(block(chain, dice)[0]) - 1, dice.weights))
    padding = torch.arange(width) >= sizes[:, None]
    tokens[padding], p[padding], q[torch.arange(width) >= sizes[:, None] - 1] = -1, torch.nan, torch.nan
    accepted, weights = block_batch(tokens, sizes, p, q, uniforms)
    assert accepted.tolist() == [count for count, _ in expected]
    assert {0, 1, width - 1} <= set(accepted.tolist()) and (accepted < sizes).all()
    torch.testing.assert_close(weights / weights.sum(1, keepdim=True), torch.stack([law for _, law in expected]))


def test_block_batch_never_reads_a_value_on_the_host() -> None:
    """A meta tensor has no values: any sync would raise."""
    with torch.device("meta"):
        laws, tokens, sizes = torch.empty(2, 4, 7), torch.empty(2, 4).long(), torch.empty(2).long()
        accepted, weights = block_batch(tokens, sizes, laws, laws, torch.empty(2, 5))
    assert accepted.shape == (2,) and accepted.dtype == torch.long and weights.shape == (2, 7)


def test_siblings_come_in_the_order_of_draws_without_replacement() -> None:
    q = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.0, 0.2, 0.7]], dtype=torch.float64)
    rounds, generator = 60_000, torch.Generator().manual_seed(0)
    uniforms = torch.rand(2 * rounds, 4, generator=generator, dtype=torch.float64)
    drawn = sample_siblings(q.repeat(rounds, 1), 2, uniforms).view(rounds, 2, 2)
    for row, law in enumerate(q):
        counts = torch.bincount(drawn[:, row] @ torch.tensor([4, 1]), minlength=16).view(4, 4)
        expected = rounds * law[:, None] * law / (1 - law[:, None])
        expected.fill_diagonal_(0)
        assert (counts[expected == 0] == 0).all()
        cells = expected > 0
        statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
        assert statistic < 31.3  # chi-square, 11 degrees of freedom: one in a thousand; fewer for the second row


def test_siblings_at_the_edges() -> None:
    q = torch.tensor([[0.0, 0.9, 0.0, 0.1]], dtype=torch.float64)
    for uniforms in (torch.zeros_like(q), torch.ones_like(q), torch.full_like(q, 0.5)):
        tokens = sample_siblings(q, 4, uniforms)[0].tolist()
        assert sorted(tokens) == [0, 1, 2, 3] and set(tokens[:2]) == {1, 3}
    with pytest.raises(ValueError, match="float64"):
        sample_siblings(q, 2, torch.rand(1, 4))
    with pytest.raises(ValueError, match="cannot draw 5"):
        sample_siblings(q, 5, torch.zeros_like(q))
