"""Draft models whose output is padded to another size than the target's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode import Sampling, Target, Tree, generate
from proposers import DraftProposer
from tests.support.models import VOCABULARY, tiny
from tests.support.speculating import make_tokenizer

TOKENIZER = make_tokenizer()
PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9], [95, 95]]
SIZES = VOCABULARY - 6, VOCABULARY + 8
PROPOSERS: dict[str, Any] = {
    "chain": lambda draft: DraftProposer(draft, length=3),
    "tree": lambda draft: DraftProposer(draft, width=3, length=3),
    "sampled": lambda draft: DraftProposer(draft, length=3, sampled=True),
}


def make(size: int = VOCABULARY, **settings: Any) -> Target:
    return Target(tiny("llama", vocab_size=size, **settings), TOKENIZER)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PROPOSERS)
def test_only_shared_tokens_are_drafted(size: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, drafted = make(), make(size), []
    proposer = PROPOSERS[name](draft)
    propose = proposer.propose
    monkeypatch.setattr(proposer, "propose", lambda *given: drafted.append(propose(*given)) or drafted[-1])
    for temperature in (0.0, 1.0):
        settings = {"sampling": Sampling(temperature, seed=1), "max_new_tokens": 14, "stop_ids": ()}
        got = [answer.tokens for answer in generate(target, PROMPTS, proposer, **settings)]
        if name != "sampled" or not temperature:
            assert got == [answer.tokens for answer in generate(target, PROMPTS, None, **settings)]
    check_tokens(drafted, min(size, VOCABULARY))


def check_tokens(trees: list[Tree], shared: int) -> None:
    """No token is drafted that one of the models lacks, and q is a distribution over the others."""
    drafts = torch.cat([tree.tokens[:, 1:].flatten() for tree in trees])
    assert len(drafts) and int(drafts.max()) < VOCABULARY
    for tree in trees:
        if tree.q is not None:
            assert tree.q.shape[-1] == VOCABULARY and not tree.q[..., shared:].any()
            assert torch.allclose(tree.q[:, :-1].sum(dim=-1), torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("size", [9, 15])
def test_sampled_drafts_keep_the_distribution(size: int) -> None:
    """Chi-square of the third token, inside drafts, against plain decoding."""
    target, draft = make(12), make(size, num_hidden_layers=1)

    def count(proposer: Any, seed: int) -> torch.Tensor:
        settings = {"sampling": Sampling(1.0, seed=seed), "max_new_tokens": 4, "stop_ids": ()}
        answers = generate(target, [[1, 2, 3]] * 300, proposer, **settings)
        return torch.bincount(torch.tensor([answer.tokens[2] for answer in answers]), minlength=12).double()

    plain, drawn = count(None, 1), count(DraftProposer(draft, length=3, sampled=True), 2)
    assert float(((plain - drawn) ** 2 / (plain + drawn).clamp(min=1)).sum()) < 33  # 11 degrees of freedom, p = 0.0005


def test_other_vocabularies_are_refused_for_what_differs() -> None:
    other = make_tokenizer()
    other.add_tokens(["another"])
    target = make()
    for draft, message in (
        (Target(tiny("llama", vocab_size=90)), "vocabulary of 90 tokens, the target one of 96.*give both"),
        (Target(target.model, other), "the draft model's tokenizer is not the target's"),
    ):
        with pytest.raises(ValueError, match=message):
            DraftProposer(draft).check(target)
