"""Sampled drafts with a grammar: by exact enumeration, answers have the target's distribution over allowed tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decode import Answer, Sampling, Target, Tree, generate
from decode.grammars.matcher import Constraint, constrain
from proposers import DraftProposer
from tests.support.enumeration import (
    EXACT,
    WRONG,
    Chain,
    Distributions,
    Prefix,
    Randomness,
    compare_third_tokens,
    count_tokens,
    emit,
    measure_error,
)
from tests.support.grammars import SumMatcher, TableMatcher
from tests.support.models import tiny
from tests.support.reference_rules import in_use

SMALL = 4  # tokens of a vocabulary
DONE = TableMatcher.DONE
TABLES: dict[str, dict[int, dict[int, int]]] = {
    "by state": {0: {0: 1, 1: 0, 2: 0}, 1: {1: 0, 3: 1}},
    "forced": {0: {2: 1}, 1: {0: 2, 1: 0}, 2: {3: 0}},
    "with an end": {0: {0: 0, 1: 1, 3: DONE}, 1: {2: DONE, 3: 0}},
    "of one token": {0: {1: DONE}},
}
KINDS = ["generic", "close", "equal", "zeros in q", "point q"]
Rule = Callable[[Chain, Randomness], tuple[int, int]]


class Constrained(Distributions):
    """A target that chooses among the tokens that a table allows, and a draft model that does not know of it."""

    def __init__(self, kind: str, table: str, seed: int = 0) -> None:
        super().__init__(kind, SMALL, seed)
        self.table = TABLES[table]

    def make(self) -> TableMatcher:
        return TableMatcher(self.table, SMALL)

    def raw(self, prefix: Prefix) -> Tensor:
        """The model's own probabilities."""
        return super().p(prefix)

    def p(self, prefix: Prefix) -> Tensor:
        matcher = self.make()
        if not all(map(matcher.accept, prefix)) or matcher.is_complete:
            return self.raw(prefix)  # no answer gets there, or it has ended
        p = self.raw(prefix) * matcher.find_allowed()
        return p / p.sum()


def judge_by(models: Constrained, cuts: bool = False) -> Rule:
    """What the loop does with a sampled chain. cuts: wrongly without its first forbidden token, too."""

    def judge(chain: Chain, randomness: Randomness) -> tuple[int, int]:
        tokens, q = torch.tensor([chain.tokens]), torch.stack(chain.q)[None]
        tree = Tree.chain_of(tokens, torch.tensor([len(chain.tokens)]), q=None if cuts else q)
        kept, allowed = constrain(tree, [Constraint(models.make, SMALL)])
        size, drawn = int(kept.sizes), tuple(chain.tokens[1:])
        p = [models.raw(drawn[:node]) * allowed[0][node] for node in range(size)]
        return in_use(Chain(chain.tokens[:size], [each / each.sum() for each in p], chain.q[:size]), randomness)

    return judge


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("table", TABLES)
def test_answers_have_the_targets_distribution_over_allowed_tokens(table: str, kind: str) -> None:
    for most in (1, 3):
        models = Constrained(kind, table)
        emitted = emit(judge_by(models), models, most)
        assert measure_error(emitted, models) < EXACT
        assert sum(emitted.values()) == pytest.approx(1)


def test_drafts_are_accepted() -> None:
    models = Constrained("close", "by state")
    assert count_tokens(emit(judge_by(models), models, 3)) > 1.5


@pytest.mark.parametrize("table", ["by state", "forced", "with an end"])
def test_cutting_a_forbidden_token_of_a_sampled_draft_would_be_wrong(table: str) -> None:
    """The rule would take the shorter chain for one that was not continued by chance."""
    models = Constrained("generic", table, seed=1)
    assert measure_error(emit(judge_by(models), models, 3), models) < EXACT
    assert measure_error(emit(judge_by(models, cuts=True), models, 3), models) > WRONG


def test_sampled_answers_fit_their_grammar_and_keep_their_distribution() -> None:
    target, draft = (Target(tiny("llama", vocab_size=12, num_hidden_layers=1, seed=seed)) for seed in (0, 1))

    def sample(proposer: DraftProposer | None, seed: int) -> list[Answer]:
        return generate(
            target,
            [[3, 4]] * 900,
            proposer,
            sampling=Sampling(1.0, seed=seed),
            grammar=lambda request_id: SumMatcher(12, size=3),
            max_new_tokens=5,
            stop_ids=[],
            batch_size=150,
        )

    plain, drawn = sample(None, 1), sample(DraftProposer(draft, sampled=True, depth=3, nodes=4), 2)
    for answer in drawn:
        matcher = SumMatcher(12, size=3)
        assert all(map(matcher.accept, answer.tokens)) and (len(answer.tokens), answer.finish) == (3, "grammar")
    assert sum(sum(answer.stats.accepted_by_depth) for answer in drawn) > 100
    assert compare_third_tokens(plain, drawn) < 31.3  # 11 degrees of freedom, p = 0.001
