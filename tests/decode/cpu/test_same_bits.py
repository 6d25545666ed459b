"""With compiled layers, a token's logits are the same bits alone, in a chain of draft tokens and in a batch."""

from __future__ import annotations

import pytest
import torch

from decode import Target
from decode.prefill import read_texts
from decode.trees.tree import Tree
from tests.support.models import needs_compiler

pytestmark = [pytest.mark.slow, needs_compiler]
LENGTHS = 40, 250, 300  # committed tokens: the chain's slots end before, in and after the second part of attention
CHAIN = 14


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def target(request: pytest.FixtureRequest) -> Target:
    return Target.load(dtype=request.param, accelerate="compiled")


@torch.inference_mode()
def test_logits_do_not_depend_on_other_tokens_of_the_pass(target: Target) -> None:
    drawn = torch.randint(3, target.vocabulary, (CHAIN + max(LENGTHS),), generator=torch.Generator().manual_seed(0))
    chain, *prompts = (drawn[:CHAIN].tolist(), *(drawn[CHAIN:][:length].tolist() for length in LENGTHS))
    batch = target.open(len(prompts))
    read_texts(batch, prompts)
    together = batch.verify(Tree.chain([chain] * len(prompts))).logits
    for row, prompt in enumerate(prompts):
        session, one_by_one = target.open(1), target.open(1)
        read_texts(session, [prompt])
        read_texts(one_by_one, [prompt])
        assert torch.equal(session.verify(Tree.chain([chain])).logits[0], together[row])
        for node, token in enumerate(chain):
            assert torch.equal(one_by_one.verify(Tree.chain([[token]])).logits[0, 0], together[row, node])
            one_by_one.keep([[0]])
