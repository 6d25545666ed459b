"""The acceptance rule for sampled chains, by exact enumeration: every draft, every outcome, its exact probability."""

from __future__ import annotations

import random

import pytest
import torch

from decode import Sampling, Tree
from decode.trees.accept import accept, pack, unpack
from decode.trees.sampling import NO_TOKEN
from decode.trees.walk import accept_processed_chains
from tests.support.enumeration import (
    EXACT,
    KINDS,
    WRONG,
    Chain,
    Distributions,
    Prefix,
    Randomness,
    RowRule,
    count_tokens,
    emit,
    measure_error,
)
from tests.support.reference_rules import RULES, block, in_use, leviathan

VOCABULARY = 6
TEXTS = {4: [1, 2, 3], 7: [5], 8: [2, 2]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_emitted_text_has_the_targets_distribution(rule: str, most: int, kind: str) -> None:
    models = Distributions(kind)
    assert measure_error(emit(RULES[rule], models, most), models) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_a_larger_vocabulary_and_other_seeds(rule: str) -> None:
    for seed in range(4):
        models = Distributions(KINDS[seed % 2], vocabulary=4, seed=seed)
        assert measure_error(emit(RULES[rule], models, 3), models) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_is_block_verification(kind: str) -> None:
    models = Distributions(kind, vocabulary=4)
    ours, theirs = emit(in_use, models, 3), emit(block, models, 3)
    assert max(abs(ours.get(text, 0.0) - theirs.get(text, 0.0)) for text in {*ours, *theirs}) < EXACT


def test_it_emits_at_least_as_much_as_testing_token_by_token() -> None:
    gains = []
    for seed, kind in enumerate(("generic", "zeros in q", "generic")):
        models = Distributions(kind, seed=seed)
        gains.append(count_tokens(emit(in_use, models, 3)) - count_tokens(emit(leviathan, models, 3)))
    assert min(gains) > -EXACT and max(gains) > WRONG


# --- mistakes that these tests must catch ----------------------------------------------------------------------------


def drop_by_token(rule: RowRule) -> RowRule:
    """Wrong: the last node is left out if its token is 0."""

    def judge(chain: Chain, randomness: Randomness) -> tuple[int, int]:
        size = len(chain.tokens) - (len(chain.tokens) > 1 and chain.tokens[-1] == 0)
        return rule(Chain(chain.tokens[:size], chain.p[:size], chain.q[:size]), randomness)

    return judge


def test_chains_may_grow_because_of_tokens_but_not_drop_a_node_because_of_its_own() -> None:
    def goes_on(drawn: Prefix) -> bool:
        return len(drawn) < 2 or hash((policy, *drawn)) % 4 > 0

    for policy in range(3):
        models = Distributions("generic", seed=policy)
        assert measure_error(emit(in_use, models, 4, goes_on), models) < EXACT
        assert measure_error(emit(drop_by_token(in_use), models, 3), models) > WRONG


def test_drafts_that_were_not_sampled_from_q_are_caught() -> None:
    """A draft of the most likely tokens, judged as if it were sampled."""

    class Best(Distributions):
        is_drafting = True

        def q(self, prefix: Prefix) -> torch.Tensor:
            q = super().q(prefix)
            return torch.nn.functional.one_hot(q.argmax(), len(q)).double() if self.is_drafting else q

    def judge(chain: Chain, randomness: Randomness) -> tuple[int, int]:
        reported = [Distributions.q(models, tuple(chain.tokens[1 : 1 + node])) for node in range(len(chain.q))]
        return in_use(Chain(chain.tokens, chain.p, reported), randomness)

    models = Best("generic", seed=2)
    assert measure_error(emit(in_use, models, 3), models) < EXACT
    assert measure_error(emit(judge, models, 3), models) > WRONG


# --- use --------------------------------------------------------------------------------------------------------------


def draft_chains(seed: int) -> Tree:
    """Chains of three rows; about a third of their tokens cannot have come from q."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = torch.tensor([choose.randint(1, 9) for _ in TEXTS])
    width = int(sizes.max())
    q = torch.rand(3, width, VOCABULARY, dtype=torch.float64, generator=generator) ** 3
    q[torch.rand(q.shape, generator=generator) < 0.3] = 0
    q[:, :, 0] += 0.01
    q /= q.sum(dim=2, keepdim=True)
    tokens = torch.zeros(3, width, dtype=torch.long)
    for row, size in enumerate(sizes.tolist()):
        for node in range(1, size):
            weights = q[row, node - 1] if choose.random() < 0.9 else torch.ones(VOCABULARY, dtype=torch.float64)
            tokens[row, node] = torch.multinomial(weights, 1, generator=generator)
    return Tree.chain_of(tokens, sizes, q=q)


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("sharpness", [0.5, 4.0])
def test_row_by_row_is_the_same_as_at_once(sharpness: float, broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no node after a token that the target cannot choose is asked for its probabilities."""
    lengths, failed = set(), 0
    for seed in range(150):
        tree = draft_chains(seed)
        assert tree.q is not None
        torch.manual_seed(seed)  # logits near the draft's, so that drafts are accepted to every depth
        logits = (tree.q + 0.02).log() + torch.randn(tree.q.shape, dtype=torch.float64) / sharpness
        if broken:
            logits = torch.where(torch.rand(logits.shape[:2])[:, :, None] < 0.3, torch.nan, logits)
        sampling = Sampling(temperature=1.0, top_k=seed % 2 * 4, seed=seed)
        expected = unpack(pack(tree, *accept_processed_chains(tree, logits, sampling, TEXTS)))
        monkeypatch.setattr("decode.trees.accept.MOST", [1, 1 << 27][seed % 2])  # one row at a time, or all
        assert accept(tree, logits, sampling, TEXTS) == expected
        lengths |= {len(path) for path in expected.path}
        for row, path in enumerate(expected.path):
            faults = [bool(logits[row, node].isnan().any()) for node in path]
            assert not any(faults[:-1]) and faults[-1] == (expected.bonus[row] == NO_TOKEN)
            failed += faults[-1]
    assert {1, 2, 3} <= lengths and (failed > 20) is broken


def test_invalid_drafts_neither_crash_nor_emit_impossible_tokens() -> None:
    """Tokens outside the support of q, and zeros in p and q; q that is NaN or infinite accepts nothing."""
    for seed in range(150):
        tree, models = draft_chains(seed), Distributions(KINDS[seed % len(KINDS)], VOCABULARY, seed)
        p = torch.stack([models.p((node,)) for node in range(tree.width)]).expand(3, -1, -1)
        accepted = accept(tree, p.log(), Sampling(temperature=1.0, seed=seed), TEXTS)
        for path, tokens, bonus in zip(accepted.path, accepted.tokens, accepted.bonus, strict=True):
            assert all(p[0, node, token] > 0 for node, token in zip(path, [*tokens[1:], bonus], strict=True))
        for fault in (torch.nan, torch.inf):
            spoilt = Tree.chain_of(tree.tokens, tree.sizes, q=torch.full_like(p, fault))
            assert accept(spoilt, p.log(), Sampling(temperature=1.0, seed=seed), TEXTS).path == [[0]] * 3
