"""Typical acceptance, which changes the text, compared with Medusa's rule node by node."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from decode import Sampling, Target, Tree, generate
from decode.trees.accept import accept, accept_lossily
from proposers import MedusaProposer
from tests.decode.test_tree import climb, random_tree
from tests.support.drafting import make_head


def find_typical_path(tree: Tree, row: int, p: Tensor) -> tuple[list[int], int]:
    """The longest path of draft tokens that pass (the most probable of equally long ones) and the token after it."""
    best = (0, 0.0, [0])
    for leaf in range(int(tree.sizes[row])):
        path = climb(tree, row, leaf)
        log_p, passes = 0.0, True
        for above, node in pairwise(path):
            after = p[row, above].tolist()
            p_node = after[int(tree.tokens[row, node])]
            entropy = -sum(each * math.log(each) for each in after if each > 0)
            passes &= p_node > min(0.09, 0.3 * math.exp(-entropy))
            log_p += math.log(p_node)
        if passes and (len(path), log_p) > (len(best[2]), best[1]):
            best = (len(path), log_p, path)
    return best[2], int(p[row, best[2][-1]].argmax())


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_typical_acceptance_is_medusas(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    longest = 0
    for seed in range(60):
        tree = random_tree(random.Random(seed))
        logits = 2 * torch.randn(3, tree.width, 6, generator=generator, dtype=torch.float64)
        accepted = accept_lossily(tree, logits, Sampling(temperature=temperature), {0: [0], 1: [0], 2: [0]})
        p = (logits / temperature).softmax(dim=-1)
        for row in range(3):
            path, bonus = find_typical_path(tree, row, p)
            assert (accepted.path[row], accepted.bonus[row]) == (path, bonus)
            assert accepted.tokens[row] == tree.tokens[row, path].tolist()
            longest = max(longest, len(path))
        assert accepted.sizes == tree.sizes.tolist()
        greedily = accept_lossily(tree, logits, Sampling(), {0: [0], 1: [0], 2: [0]})
        assert greedily.bonus == accept(tree, logits, Sampling(), {}).bonus
    assert longest > 3


def test_typical_acceptance_is_off_by_default(target: Target) -> None:
    proposer = MedusaProposer(make_head("medusa", target, output="target"), nodes=32)

    def texts(proposer: MedusaProposer | None, temperature: float, **settings: bool) -> list[list[int]]:
        settings |= {"sampling": Sampling(temperature, seed=1), "max_new_tokens": 24}
        return [answer.tokens for answer in generate(target, [[5, 6, 7], [8, 9]], proposer, **settings)]

    plain = texts(None, 1.0)
    assert texts(proposer, 1.0) == plain
    lossy = texts(proposer, 1.0, lossy_typical_acceptance=True)
    assert lossy != plain and [len(tokens) for tokens in lossy] == [24, 24]
    assert texts(proposer, 1.0, lossy_typical_acceptance=True) == lossy  # nothing is random
    assert texts(proposer, 0.0, lossy_typical_acceptance=True) == texts(None, 0.0)
